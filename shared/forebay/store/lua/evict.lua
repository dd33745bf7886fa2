-- Evicts waiting groups that would be stale even in the very next batch, and closes the open slots of running ones that
-- none can make fresh any more: they are assembled, dumped and evicted with what they have. The second saves compute; the
-- first, and the checks at the cut and at the hand-over, keep the bound.
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
      if call('HSETNX', g, 'cancelled', 1) == 1 then
        close_slots(task, 'cancelled: the group can no longer be fresh')
        count('cancelled')
      end
    end
  end
end
return gone
