-- Takes or renews the collector lease. ARGV: owner, lease ms.
-- Returns the fencing epoch while the lease is the owner's (a new one when it changes hands), else 0.
local holder = call('GET', key('lease:collector'))
if holder and holder ~= ARGV[1] then return 0 end
local last = call('HGET', STATE, 'leader')
call('SET', key('lease:collector'), ARGV[1], 'PX', ARGV[2])
if last ~= ARGV[1] then
  call('HSET', STATE, 'leader', ARGV[1])
  call('HINCRBY', STATE, 'epoch', 1)
end
return tonumber(call('HGET', STATE, 'epoch'))
