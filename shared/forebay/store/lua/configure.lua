-- Publishes the run's rules. ARGV: epoch, settings JSON, an id for the run if it has none, field, value, ... Returns 1, or 0 if fenced.
if fenced(ARGV[1]) then return 0 end
call('SET', key('settings'), ARGV[2])
local size = number('B', 0)
for at = 4, #ARGV, 2 do call('HSET', STATE, ARGV[at], ARGV[at + 1]) end
-- Batches were handed over, so batches are what counts when their size changes.
if size > 0 and size ~= number('B', 1) then
  call('HSET', STATE, 'ahead', math.ceil(number('ahead', 0) / size) * number('B', 1))
end
-- Groups stay in the partition that they were given, whatever their number becomes.
call('HSET', STATE, 'P_max', math.max(number('P', 1), number('P_max', 1)))
call('HSETNX', STATE, 'version', 0)
call('HSETNX', STATE, 'incarnation', ARGV[3])
redis.pcall('XGROUP', 'CREATE', key('prompts'), 'admission', '0', 'MKSTREAM') -- an error: it exists
redis.pcall('XGROUP', 'CREATE', key('prompts:direct'), 'admission', '0', 'MKSTREAM')
wake('admission')
return 1
