-- A waiting group that no reader can read: it is evicted. ARGV: epoch, member of the ready set, reason, sample.
-- Returns 1 if it waited, 0 if not, -1 if fenced. A member that is no group of the run only leaves the set.
local task, reason = ARGV[2], ARGV[3]
if fenced(ARGV[1]) then return -1 end
if call('ZREM', key('ready'), task) == 0 then return 0 end
set_aside('ready:' .. task, 'ready', reason, ARGV[4])
if call('HGET', group_key(task), 'st') == 'ready' then
  bury(task, 'evicted', 'unreadable: ' .. reason, 'cut', 'unreadable', reason)
  count('evicted')
  tell_dump(task)
end
wake('admission')
return 1
