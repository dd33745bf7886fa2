-- The trainer is done with a batch: its rows go. ARGV: consumer group, entry id, batch id. Returns 1 the first time.
local acked = call('XACK', key('batches'), ARGV[1], ARGV[2])
local tasks = batch_key(ARGV[3]) .. ':tasks'
if acked == 0 then return 0 end
for _, task in ipairs(call('LRANGE', tasks, 0, -1)) do bury(task, 'delivered', 'batch ' .. ARGV[3]) end
call('UNLINK', batch_key(ARGV[3]), tasks)
call('XDEL', key('batches'), ARGV[2])
count('batches_acked')
return 1
