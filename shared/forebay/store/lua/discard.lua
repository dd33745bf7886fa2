-- Whoever collected these groups has their rows: what is held of them goes. ARGV, for each: task, summary ('' unless its
-- reader has normalized its rewards). Returns how many.
local gone = 0
for at = 1, #ARGV, 2 do
  local task = ARGV[at]
  if call('ZREM', key('collected'), task) == 1 then
    tell_rewards(task, ARGV[at + 1])
    bury(task, 'delivered', 'collected')
    gone = gone + 1
  end
end
return gone
