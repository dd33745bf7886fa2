-- Records the collector's decision on an assembled group, with its counters and the removal of its result entries.
-- ARGV: epoch, task, 'ready' | 'rejected', reason, summary, head version, dump folder.
-- A group that is stale already is evicted here. Returns 'done', 'noop' (it is not running any more) or 'fenced'.
local epoch, task, decision, reason = ARGV[1], ARGV[2], ARGV[3], ARGV[4]
if fenced(epoch) then return 'fenced' end
local g = group_key(task)
if call('HGET', g, 'st') ~= 'running' then return 'noop' end
local n = tonumber(call('HGET', g, 'n'))
for idx = 0, n - 1 do
  if call('HEXISTS', g, 'd' .. idx) == 0 then return 'noop' end -- a slot is still open: nothing can be decided
end
for idx = 0, n - 1 do call('XDEL', key('results:0'), call('HGET', g, 'e' .. idx)) end
call('SREM', key('running'), task)
call('ZREM', key('deadlines'), task)
call('HSET', g, 'dump', ARGV[7])
if decision == 'ready' then
  local seq = call('HINCRBY', STATE, 'commit_seq', 1)
  call('HDEL', g, 'spec', 'rules')
  call('HSET', g, 'st', 'ready', 'sum', ARGV[5], 'head', ARGV[6], 'seq', seq)
  local before = call('HLEN', key('cut')) + call('ZCARD', key('ready'))
  local version = version_at_training(before - before % number('B', 1)) -- whole batches before its own
  call('ZADD', key('ready'), seq, task)
  count('accepted')
  if stale_at(task, version) then evict(task, version) end
else
  bury(task, 'rejected', reason)
  count('rejected')
  count('rejected:' .. reason)
end
wake('admission')
wake('cutter')
return 'done'
