-- Cuts a batch from ready groups, judging freshness for the version at which it will be trained on.
-- ARGV: epoch, index, what its metrics tell of decided groups (a msgpack map of `tally`'s fields; '': nothing), and for
-- each group: task, summary ('' unless its rewards are normalized by this batch).
-- Returns {'cut', batch id}, {'again', evicted ...} (something changed: read the ready set anew), or {'fenced'}.
if fenced(ARGV[1]) then return {'fenced'} end
local version = version_at_training(cut_ahead())
local again = {'again'}
local missing = false
for at = 4, #ARGV, 2 do
  local task = ARGV[at]
  if not call('ZSCORE', key('ready'), task) then
    missing = true
  elseif stale_at(task, version) then
    evict(task, version, 'cut')
    again[#again + 1] = task
  end
end
if missing or #again > 1 or #ARGV < 4 then return again end
local batch = call('HINCRBY', STATE, 'batch_seq', 1)
for at = 4, #ARGV, 2 do
  call('ZREM', key('ready'), ARGV[at])
  call('HSET', key('cut'), ARGV[at], batch)
  call('HSET', group_key(ARGV[at]), 'st', 'batched', 'batch', batch)
  call('RPUSH', batch_key(batch) .. ':tasks', ARGV[at])
  tell_rewards(ARGV[at], ARGV[at + 1])
end
local entry = call('XADD', key('batches'), '*', 'b', batch, 'x', ARGV[2])
call('HSET', batch_key(batch), 'st', 'unread', 'e', entry)
call('HINCRBY', STATE, 'cut_batches', 1)
-- Of those rejected so far the next batch knows nothing.
call('HSET', STATE, 'cut_at', now_ms(), 'settled', call('ZCARD', key('ready')))
for field, told in pairs(ARGV[3] ~= '' and cmsgpack.unpack(ARGV[3]) or {}) do
  if call('HINCRBY', key('tally'), field, 0 - told) <= 0 then call('HDEL', key('tally'), field) end
end
count('batches_cut')
return {'cut', tostring(batch)}
