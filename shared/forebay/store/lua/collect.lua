-- Hands a group over to whoever asks for it by its id: one that is held for that, or one that waits for a batch.
-- ARGV: task. Repeating the call gives the same until `discard`.
-- Returns {'group', summary, version}, {'wait'}, {'stopped', reason}, {'rejected' | 'evicted', reason, group size, usable
-- slots}, {'batched', batch id} or {'unknown'}.
local task = ARGV[1]
local g = group_key(task)
local state, direct, summary = unpack(call('HMGET', g, 'st', 'ch', 'sum'))

local function ended(how)
  local why, n, usable = unpack(call('HMGET', g, 'why', 'n', 'usable'))
  return {how, why, n or 0, usable or 0}
end

local function hand_over()
  call('HSET', g, 'st', 'delivered')
  call('ZREM', key('held'), task)
  call('ZADD', key('collected'), now_ms(), task)
  count('delivered')
  return {'group', summary, call('HGET', STATE, 'version')}
end

if not state then return {'unknown'} end
if state == 'rejected' or state == 'evicted' then return ended(state) end
if state == 'held' or state == 'ready' then
  local version = version_at_training(0)
  if direct ~= 'eval' and stale_at(task, version) then
    call('ZREM', key('held'), task)
    evict(task, version, 'hand-over')
    return ended('evicted')
  end
  if state == 'ready' then
    call('ZREM', key('ready'), task)
    call('HDEL', g, 'spec', 'rules') -- not counted as ahead: whole batches are, and a rest would block the reader
  end
  return hand_over()
end
if state == 'delivered' and call('ZSCORE', key('collected'), task) then
  return {'group', summary, call('HGET', STATE, 'version')}
end
local batch = call('HGET', g, 'batch')
if batch then return {'batched', batch} end
if state == 'delivered' then return {'unknown'} end
local stopped = call('HGET', STATE, 'stopped')
if stopped then return {'stopped', stopped} end
return {'wait'}
