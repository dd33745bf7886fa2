-- Records how an attempt ended. The first valid result of a slot counts, whichever attempt brought it.
-- ARGV: task, idx, attempt, outcome, failure kind or '', header, head version (-1: none), reason of a failure.
-- Returns 'accepted', 'retry' (another attempt is queued), 'duplicate', 'superseded' or 'late'.
local task, idx, attempt, outcome, kind, header = ARGV[1], ARGV[2], ARGV[3], ARGV[4], ARGV[5], ARGV[6]
local g = group_key(task)
local rows = rows_key(task, idx, attempt)
local done = call('HGET', g, 'd' .. idx)
if done == attempt then -- a repeated call, which has set its rows anew: with a TTL
  call('PERSIST', rows)
  return 'accepted'
end
if call('HGET', g, 'st') ~= 'running' then
  call('UNLINK', rows)
  count('late')
  return 'late'
end
if done then
  call('UNLINK', rows)
  count('duplicates')
  return 'duplicate'
end
local current = call('HGET', g, 'a' .. idx)
if outcome == 'failed' then
  if current ~= attempt then return 'superseded' end
  count('failures:' .. kind)
  if fail_attempt(task, idx, tonumber(attempt), kind, now_ms()) == 'retry' then return 'retry' end
elseif current ~= attempt then
  retire(task, idx, current)
end
retire(task, idx, attempt)
call('PERSIST', rows)
settle(task, idx, attempt, header)
count('slots:' .. outcome)
if outcome == 'failed' then
  dead_letter(task, idx, attempt, kind, ARGV[8], header)
  note_failure(kind, ARGV[8])
else
  end_row('slots')
  local head, smallest = tonumber(ARGV[7]), tonumber(call('HGET', g, 'head'))
  if head >= 0 and (not smallest or head < smallest) then call('HSET', g, 'head', head) end
end
return 'accepted'
