-- Gives a worker attempts that are due and still wanted, with their leases, in one step for many.
-- ARGV: worker, most, lease ms.
-- Refused when memory is short.
-- Returns {{job id, group size, ms to the group's deadline}, ..., }, {task, spec, ...} with each spec once.
-- A claimed job leaves arq's queue here: the lease stands for it from now on. So idle workers do not step over the ids
-- of running jobs, which arq's own claim does, and a worker that dies loses it after the lease, not after a time-out.
local worker, most, lease = ARGV[1], tonumber(ARGV[2]), tonumber(ARGV[3])
if call('HEXISTS', STATE, 'stopped') == 1 then return {{}, {}} end
local queue, leases = key('jobs'), key('leases')
local now, claimed, specs, seen = now_ms(), {}, {}, {}

local function wanted(g, task, idx, attempt)
  local slot = call('HMGET', g, 'st', 'd' .. idx, 'a' .. idx)
  return slot[1] == 'running' and not slot[2] and slot[3] == attempt
end

while #claimed < most do
  local ids = call('ZRANGEBYSCORE', queue, '-inf', now, 'LIMIT', 0, most - #claimed)
  if #ids == 0 then break end
  for _, id in ipairs(ids) do
    call('ZREM', queue, id)
    local task, idx, attempt = string.match(id, ':(%d+):(%d+):(%d+)$')
    local g = group_key(task or '')
    if task and id == job_id(task, idx, attempt) and wanted(g, task, idx, attempt) then
      call('ZADD', leases, now + lease, member(task, idx, attempt))
      call('HSET', g, 'w' .. idx, worker, 'c' .. idx, now)
      claimed[#claimed + 1] = {id, call('HGET', g, 'n'), tonumber(call('HGET', g, 'dl')) - now}
      if not seen[task] then
        seen[task] = true
        specs[#specs + 1] = task
        specs[#specs + 1] = call('HGET', g, 'spec')
      end
    else
      call('UNLINK', 'arq:job:' .. id)
    end
  end
end
-- A wake-up wakes one worker: what it has no room for, another shall look at.
if #claimed >= most and call('ZCOUNT', queue, '-inf', now) > 0 then wake('jobs') end
return {claimed, specs}
