-- Evicts waiting groups that would be stale even in the very next batch, and cancels running ones that no slot can make
-- fresh any more. The second saves compute; the first, and the checks at the cut and at the hand-over, keep the bound.
-- ARGV: epoch, 1 to cancel running groups. Returns the evicted task ids.
if fenced(ARGV[1]) then return {} end
local version = version_at_training(cut_ahead())
local gone = {}
for _, task in ipairs(call('ZRANGE', key('ready'), 0, -1)) do
  if stale_at(task, version) then
    evict(task, version, 'waiting')
    gone[#gone + 1] = task
  end
end
if ARGV[2] == '1' then
  for _, task in ipairs(call('SMEMBERS', key('running'))) do
    local g = group_key(task)
    if stale_at(task, version) then -- by the slots that have ended
      for idx = 0, tonumber(call('HGET', g, 'n')) - 1 do
        local slot = call('HMGET', g, 'd' .. idx, 'a' .. idx, 'e' .. idx)
        if slot[1] then call('XDEL', key('results:0'), slot[3]) else retire(task, idx, slot[2]) end
      end
      call('SREM', key('running'), task)
      call('ZREM', key('deadlines'), task)
      evict(task, version, 'cancelled')
      count('cancelled')
      gone[#gone + 1] = task
    end
  end
end
return gone
