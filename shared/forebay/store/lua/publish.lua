-- Records how an attempt ended. The first valid result of a slot counts, whichever attempt brought it.
-- ARGV: task, idx, attempt, outcome, failure kind or '', header, head version (-1: none), reason of a failure, bytes of
-- its rows, which were written before (0: it has none).
-- Returns 'accepted', 'retry' (another attempt is queued), 'duplicate', 'superseded', 'late' or 'no_rows': they are not
-- there, because the server had no memory for them, and nothing has changed. uses _bounds
-- Refused when memory is short.
local task, idx, attempt, outcome, kind, header = ARGV[1], ARGV[2], ARGV[3], ARGV[4], ARGV[5], ARGV[6]
local g = group_key(task)
local rows = rows_key(task, idx, attempt)
local done = call('HGET', g, 'd' .. idx)
local bytes = tonumber(ARGV[9]) or 0
if done == attempt then -- a repeated call
  if bytes > 0 then call('PERSIST', rows) end
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
if bytes > 0 and call('STRLEN', rows) ~= bytes then return 'no_rows' end
local current = call('HGET', g, 'a' .. idx)
if outcome == 'failed' then
  call('UNLINK', rows) -- written by an earlier try to publish it as usable
  if current ~= attempt then return 'superseded' end
  count('failures:' .. kind)
  call('HSET', g, 'x' .. idx, kind .. ': ' .. string.sub(ARGV[8], 1, MAX_DETAIL)) -- for who asks what a group waits for
  if fail_attempt(task, idx, tonumber(attempt), kind, now_ms()) == 'retry' then return 'retry' end
elseif current ~= attempt then
  retire(task, idx, current)
end
retire(task, idx, attempt)
if bytes > 0 then
  call('PERSIST', rows)
  call('HINCRBY', g, 'rb', bytes)
  call('HINCRBY', STATE, 'rows_bytes', bytes)
  note_slot_bytes(bytes)
end
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
