-- Evicts waiting groups that would be stale even in the very next batch. ARGV: epoch. Returns the evicted task ids.
if fenced(ARGV[1]) then return {} end
local version = version_at_training(call('HLEN', key('cut')))
local gone = {}
for _, task in ipairs(call('ZRANGE', key('ready'), 0, -1)) do
  if stale_at(task, version) then
    evict(task, version)
    gone[#gone + 1] = task
  end
end
return gone
