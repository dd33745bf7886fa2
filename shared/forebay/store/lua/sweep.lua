-- Every open slot of a running group is queued or leased; one that is neither was lost, and its next attempt is queued:
-- the worker that had the lost one may yet bring a result, and the rows of two workers must not share a key. No budget is
-- touched. ARGV: epoch, task, ... Returns how many were lost.
if fenced(ARGV[1]) then return 0 end
local lost = 0
for at = 2, #ARGV do
  local task = ARGV[at]
  local g = group_key(task)
  if call('HGET', g, 'st') == 'running' then
    for idx = 0, tonumber(call('HGET', g, 'n')) - 1 do
      local slot = call('HMGET', g, 'd' .. idx, 'a' .. idx)
      if not slot[1] and not call('ZSCORE', key('leases'), member(task, idx, slot[2]))
          and not call('ZSCORE', key('jobs'), job_id(task, idx, slot[2])) then
        retire(task, idx, slot[2])
        enqueue(task, idx, tonumber(slot[2]) + 1, now_ms())
        lost = lost + 1
      end
    end
  end
end
if lost > 0 then
  count('jobs_lost', lost)
  wake('jobs')
end
return lost
