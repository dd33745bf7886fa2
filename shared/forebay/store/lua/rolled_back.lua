-- Somebody has seen more of the run than is there: Redis has gone back in time. The run stops until it is reconciled,
-- and what was seen is kept, the largest of each, for that.
-- ARGV: reason, reconciliations seen, incarnation seen, and three words for each mark: 'state' | 'counters', field,
-- value; or 'version', recoveries, version. Returns 1, or 0 if that is not so, or not any more.
local reconciled, back = tonumber(ARGV[2]), false
local there = number('reconciled', 0)
if there > reconciled then return 0 end
back = there < reconciled or (ARGV[3] ~= '' and call('HGET', STATE, 'incarnation') ~= ARGV[3])
for at = 4, #ARGV, 3 do
  local kind, field, value = ARGV[at], ARGV[at + 1], tonumber(ARGV[at + 2])
  if kind == 'version' then
    back = back or (number('recoveries', 0) == tonumber(field) and number('version', 0) < value)
  else
    back = back or (tonumber(call('HGET', key(kind), field)) or 0) < value
  end
end
if not back then return 0 end
for at = 4, #ARGV, 3 do
  local seen, value = 'seen:' .. ARGV[at + 1], tonumber(ARGV[at + 2])
  if ARGV[at] == 'state' then call('HSET', STATE, seen, math.max(number(seen, 0), value)) end
end
call('HSET', STATE, 'seen:reconciled', math.max(number('seen:reconciled', 0), reconciled))
call('HSETNX', STATE, 'rolled_back', ARGV[1])
stop_run(ARGV[1])
return 1
