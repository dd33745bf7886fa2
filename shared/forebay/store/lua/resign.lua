-- A collector ends: whatever it holds may be taken at once. uses _partitions
-- ARGV: collector.
local me = ARGV[1]
for p = 0, math.max(number('P', 1), number('P_max', 1)) - 1 do let_go(p, me) end
call('ZREM', COLLECTORS, me)
if call('GET', key('lease:collector')) == me then
  call('DEL', key('lease:collector'))
  call('HDEL', STATE, 'leader')
  call('HINCRBY', STATE, 'epoch', 1)
end
return 1
