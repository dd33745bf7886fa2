-- A trainer begins again from a checkpoint: nothing is handed over ahead of its version any more, until batches that it
-- had not acknowledged come again. ARGV: version. Returns the version before.
local before = number('version', 0)
call('HSET', STATE, 'version', ARGV[1], 'ahead', 0)
call('HINCRBY', STATE, 'recoveries', 1)
wake('admission')
wake('cutter')
return before
