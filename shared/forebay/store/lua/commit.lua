-- Records the collector's decision on an assembled group, with its counters and the removal of its result entries.
-- uses _partitions
-- ARGV: epoch of the partition, task, 'ready' | 'rejected', reason, summary, head version, dump folder, detail, usable
-- slots, partition, and the id of the result entry that each slot was taken from, or nothing.
-- A group that is stale already is evicted here. Returns 'done', 'evicted' (it was cancelled while it ran), 'noop' (it is
-- not running any more), 'foreign' (one of the entries is not the slot's own: nothing has changed) or 'fenced'.
local epoch, task, decision, reason, partition = ARGV[1], ARGV[2], ARGV[3], ARGV[4], ARGV[10]
if partition_fenced(partition, epoch) then return 'fenced' end
local g = group_key(task)
if call('HGET', g, 'st') ~= 'running' then return 'noop' end
if partition_of(task) ~= partition then return 'foreign' end
local n, direct = tonumber(call('HGET', g, 'n')), call('HGET', g, 'ch')
for idx = 0, n - 1 do
  if ARGV[11 + idx] and ARGV[11 + idx] ~= call('HGET', g, 'e' .. idx) then return 'foreign' end
end
for idx = 0, n - 1 do
  if call('HEXISTS', g, 'd' .. idx) == 0 then return 'noop' end -- a slot is still open: nothing can be decided
end
for idx = 0, n - 1 do call('XDEL', key('results:' .. partition), call('HGET', g, 'e' .. idx)) end
uncount(task, 'hb', 'results_bytes')
call('SREM', key('running'), task)
call('SREM', key('running:direct'), task)
call('ZREM', key('deadlines'), task)
call('HSET', g, 'dump', ARGV[7], 'usable', ARGV[9])
if direct == '' then call('HINCRBY', STATE, 'settled', 1) end

local function to_ready()
  local seq = call('HINCRBY', STATE, 'commit_seq', 1)
  call('HSET', g, 'st', 'ready', 'seq', seq)
  local before = cut_ahead() + call('ZCARD', key('ready'))
  local version = version_at_training(before - before % number('B', 1)) -- whole batches before its own
  call('ZADD', key('ready'), seq, task)
  if stale_at(task, version) then evict(task, version, 'assembly') end
end

if call('HEXISTS', g, 'cancelled') == 1 then -- whatever was decided on what it has
  evict(task, version_at_training(cut_ahead()), 'cancelled')
  return 'evicted'
end
-- What the next batch tells of the groups that were decided before it, whichever collector decided on them.
if direct ~= 'eval' then call('HINCRBY', key('tally'), n .. ':' .. ARGV[9] .. ':' .. reason, 1) end
if decision == 'ready' then
  if number('max_requeues', 0) == 0 or direct ~= '' then call('HDEL', g, 'spec', 'rules') end
  call('HSET', g, 'sum', ARGV[5], 'head', ARGV[6])
  end_row('groups')
  end_row('barren')
  count('accepted')
  if direct == '' then
    to_ready()
  else
    call('HSET', g, 'st', 'held')
    call('ZADD', key('held'), now_ms(), task)
  end
else
  bury(task, 'rejected', reason, 'assembly', reason, ARGV[8])
  count('rejected')
  count('rejected:' .. reason)
  if reason == 'contract_error' then
    one_in_a_row('groups', ARGV[8], number('max_contract_errors', 8),
      'groups in a row broke the contract (max_contract_errors)')
  else
    end_row('groups')
  end
  if reason == 'filtered' then
    end_row('barren') -- the filter has judged: nothing is wrong with the run
  else
    one_in_a_row('barren', reason .. ': ' .. ARGV[8], number('max_barren_groups', 100),
      'groups in a row brought nothing to train on (max_barren_groups)')
  end
end
wake('admission')
wake('cutter')
return 'done'
