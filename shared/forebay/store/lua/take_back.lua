-- Groups that the trainer's checkpoint was trained on are delivered, wherever they are here; those in batches that are
-- kept are noted, for reconcile.lua to judge the whole batch. uses _batches
-- uses _reconcile
-- ARGV: task, ... Returns those that were pending.
local taken, queues = {}, {}

local function leave_queue(task, stream)
  if not queues[stream] then
    queues[stream] = {}
    for _, entry in ipairs(call('XRANGE', key(stream), '-', '+')) do
      local of = named(entry[2]).t
      if of then queues[stream][of] = entry[1] end
    end
  end
  local entry, g = queues[stream][task], group_key(task)
  if entry then call('XDEL', key(stream), entry) end
  local waiting = call('HSTRLEN', g, 'spec') + call('HSTRLEN', g, 'rules')
  call('HINCRBY', STATE, queued_bytes(stream == 'prompts' and '' or 'direct'), 0 - waiting)
end

local function stop_running(task, g)
  for idx = 0, tonumber(call('HGET', g, 'n')) - 1 do
    local slot = call('HMGET', g, 'd' .. idx, 'a' .. idx, 'e' .. idx)
    if slot[1] then
      call('XDEL', key('results:' .. partition_of(task)), slot[3])
    else
      retire(task, idx, slot[2])
    end
  end
  uncount(task, 'hb', 'results_bytes')
  call('SREM', key('running'), task)
  call('SREM', key('running:direct'), task)
  call('ZREM', key('deadlines'), task)
end

for _, task in ipairs(ARGV) do
  local g = group_key(task)
  local state, direct, batch = unpack(call('HMGET', g, 'st', 'ch', 'batch'))
  local pending = true
  if state == 'queued' then
    leave_queue(task, direct == '' and 'prompts' or 'prompts:direct')
  elseif state == 'running' then
    stop_running(task, g)
  elseif state == 'ready' then
    call('ZREM', key('ready'), task)
  elseif state == 'held' then
    call('ZREM', key('held'), task)
  elseif state == 'batched' then
    call('HDEL', key('cut'), task)
    call('HSET', g, 'st', 'gone')
    undo_batch(batch, false)
  else
    pending = false
    if state == 'delivered' and batch and call('EXISTS', batch_key(batch)) == 1 then
      call('HSET', g, 'trained', 1)
    elseif call('ZREM', key('collected'), task) == 1 then
      bury(task, 'delivered', WHY)
    end
  end
  if pending then
    bury(task, 'delivered', WHY)
    count('delivered')
    taken[#taken + 1] = task
  end
end
if #taken > 0 then
  count('taken_back', #taken)
  wake('admission')
  wake('cutter')
end
return taken
