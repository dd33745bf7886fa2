-- A worker says that it lives and renews its leases.
-- ARGV: worker, what it says of itself, lease ms, what its attempts do or '', task, idx, attempt, ... Returns the attempts it has lost, as
-- "task:idx:attempt", so that it stops them.
local now = now_ms()
spare_after_silence(now, tonumber(ARGV[3]))
call('HSET', key('workers'), ARGV[1], ARGV[2])
call('ZADD', key('workers:seen'), now, ARGV[1])
if ARGV[4] ~= '' then call('HSET', key('workers:doing'), ARGV[1], ARGV[4]) end
for _, gone in ipairs(call('ZRANGEBYSCORE', key('workers:seen'), '-inf', now - 3600 * 1000, 'LIMIT', 0, 100)) do
  call('HDEL', key('workers:doing'), gone)
  call('HDEL', key('workers'), gone) -- one that died without signing off, an hour ago
  call('ZREM', key('workers:seen'), gone)
end
local lost = {}
for at = 5, #ARGV, 3 do
  local m = member(ARGV[at], ARGV[at + 1], ARGV[at + 2])
  if call('ZSCORE', key('leases'), m) then
    call('ZADD', key('leases'), 'XX', now + tonumber(ARGV[3]), m)
  else
    lost[#lost + 1] = m
  end
end
return lost
