-- Supersedes attempts whose lease has ended, closes groups whose deadline has passed, drops what nobody collects.
-- ARGV: epoch, most to handle, lease ms, or 0 to spare no lease after a silence of all workers.
-- Returns {leases ended, groups closed}, or {-1, 0} if fenced.
if fenced(ARGV[1]) then return {-1, 0} end
local now, most = now_ms(), tonumber(ARGV[2])

local lease, expired = tonumber(ARGV[3]), {}
if lease > 0 then spare_after_silence(now, lease) end
if lease == 0 or now >= number('spare_until', 0) then
  expired = call('ZRANGEBYSCORE', key('leases'), '-inf', now, 'LIMIT', 0, most)
end
for _, m in ipairs(expired) do
  local task, idx, attempt = string.match(m, '^(%d+):(%d+):(%d+)$')
  call('ZREM', key('leases'), m)
  local slot = {}
  if task then
    slot = call('HMGET', group_key(task), 'st', 'd' .. idx, 'a' .. idx, 'w' .. idx)
  else
    set_aside('lease:' .. m, 'leases', 'a lease of no attempt', m)
  end
  if slot[1] == 'running' and not slot[2] and slot[3] == attempt then
    count('leases_lost')
    count('failures:infra')
    call('HSET', group_key(task), 'x' .. idx, 'infra: worker ' .. (slot[4] or '?') .. ' fell silent')
    if fail_attempt(task, idx, tonumber(attempt), 'infra', now) == 'final' then
      local reason = 'worker ' .. (slot[4] or '?') .. ' fell silent'
      local header = failure(task, idx, attempt, 'infra', reason)
      settle(task, idx, NOBODY, header)
      count('slots:failed')
      dead_letter(task, idx, attempt, 'infra', reason, header)
      note_failure('infra', reason)
    end
  end
end

local late = call('ZRANGEBYSCORE', key('deadlines'), '-inf', now, 'LIMIT', 0, most)
for _, task in ipairs(late) do
  local g = group_key(task)
  call('ZREM', key('deadlines'), task)
  if call('HGET', g, 'st') == 'running' then
    local reason = 'the deadline of the group passed'
    for _, slot in ipairs(close_slots(task, reason)) do
      count('failures:timeout')
      dead_letter(task, slot.idx, slot.attempt, 'timeout', reason, slot.header)
      note_failure('timeout', reason)
    end
  end
end
local old = now - number('held_ms', 21600000)
for _, task in ipairs(call('ZRANGEBYSCORE', key('held'), '-inf', old, 'LIMIT', 0, most)) do
  call('ZREM', key('held'), task)
  bury(task, 'evicted', 'nobody asked for its result', 'uncollected', 'uncollected', 'nobody asked for its result')
  count('evicted')
  tell_dump(task)
end
for _, task in ipairs(call('ZRANGEBYSCORE', key('collected'), '-inf', old, 'LIMIT', 0, most)) do
  call('ZREM', key('collected'), task)
  bury(task, 'delivered', 'handed over')
end
return {#expired, #late}
