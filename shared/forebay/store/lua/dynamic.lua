-- Whether batches are cut once accepted and rejected groups reach the batch size. ARGV: 1 or 0. Returns 1 if it changed.
if call('HGET', STATE, 'dynamic') == ARGV[1] then return 0 end
call('HSET', STATE, 'dynamic', ARGV[1], 'settled', call('ZCARD', key('ready')))
wake('cutter')
return 1
