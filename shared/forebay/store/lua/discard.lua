-- Whoever collected these groups has their rows: what is held of them goes. ARGV: task, ... Returns how many.
local gone = 0
for _, task in ipairs(ARGV) do
  if call('ZREM', key('collected'), task) == 1 then
    bury(task, 'delivered', 'collected')
    gone = gone + 1
  end
end
return gone
