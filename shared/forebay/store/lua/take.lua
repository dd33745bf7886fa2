-- Hands the next batch to a trainer. A batch that nobody has read is judged for freshness once more: if one of its
-- groups is stale it is dissolved, the fresh ones go back to ready. Once handed over it is frozen.
-- ARGV: consumer group, consumer, id of the last entry that this reader got.
-- Returns {'batch', entry id, batch id, index, version, redelivered}, {'end'} (end of data, nothing on its way),
-- {'stopped', reason} (the run has stopped itself), {'blocked', version} (nothing can come before the version moves) or
-- {'empty'}.
local name, consumer, after = ARGV[1], ARGV[2], ARGV[3]
local stream = key('batches')

local function dissolve(entry, batch, tasks, version)
  for _, task in ipairs(tasks) do
    if stale_at(task, version) then
      evict(task, version, 'hand-over')
    else
      local g = group_key(task)
      call('HDEL', key('cut'), task)
      call('HDEL', g, 'batch')
      call('HSET', g, 'st', 'ready')
      call('ZADD', key('ready'), call('HGET', g, 'seq'), task)
    end
  end
  call('HINCRBY', STATE, 'cut_batches', -1)
  call('UNLINK', batch_key(batch), batch_key(batch) .. ':tasks')
  call('XACK', stream, name, entry)
  call('XDEL', stream, entry)
  count('batches_dissolved')
  wake('cutter')
end

-- A batch counts as handed over ahead of the version once, and once more for a trainer that began again since. A
-- partial one counts whole: the trainer steps once for it.
local function count_ahead(batch)
  local recoveries = tostring(number('recoveries', 0))
  if call('HGET', batch_key(batch), 'counted') == recoveries then return end
  call('HSET', batch_key(batch), 'counted', recoveries)
  call('HINCRBY', STATE, 'ahead', number('B', 1))
end

local function hand_over(tasks, batch)
  call('HSET', batch_key(batch), 'st', 'delivered')
  call('HINCRBY', STATE, 'cut_batches', -1)
  for _, task in ipairs(tasks) do
    call('HDEL', key('cut'), task)
    call('HSET', group_key(task), 'st', 'delivered')
    call('HDEL', group_key(task), 'spec', 'rules')
  end
  count('delivered', #tasks)
  count('batches_delivered')
end

-- What is wrong with an entry of the stream: a batch has one, and a record of its own.
local function fault_of(entry, batch, index)
  if not batch or not index or not string.match(batch, '^%d+$') then return 'it is no entry of a batch' end
  local state, own = unpack(call('HMGET', batch_key(batch), 'st', 'e'))
  if not state then return 'there is no such batch' end
  if own and own ~= entry then return 'it is not the entry of that batch' end
end

for _ = 1, 1000 do
  -- First what this reader was given and, for want of an answer or of an ack, may not know; then what is new.
  local read = call('XREADGROUP', 'GROUP', name, consumer, 'COUNT', 1, 'STREAMS', stream, after)
  if not read or #read[1][2] == 0 then
    read = call('XREADGROUP', 'GROUP', name, consumer, 'COUNT', 1, 'STREAMS', stream, '>')
  end
  if not read then break end
  local entry, fields = read[1][2][1][1], read[1][2][1][2]
  local own = named(fields or {})
  local batch, index = own.b, own.x
  local gone = not fields or #fields == 0 -- deleted while pending
  local fault = not gone and fault_of(entry, batch, index)
  if gone then
    call('XACK', stream, name, entry)
    after = entry
  elseif fault then
    set_aside('batches:' .. entry, 'batches', fault, table.concat(fields, ' '))
    call('XACK', stream, name, entry)
    call('XDEL', stream, entry)
  else
    local tasks = call('LRANGE', batch_key(batch) .. ':tasks', 0, -1)
    local again = call('HGET', batch_key(batch), 'st') == 'delivered'
    local version = version_at_training(0)
    local stale = false
    if not again then
      for _, task in ipairs(tasks) do stale = stale or stale_at(task, version) end
    end
    if stale then
      dissolve(entry, batch, tasks, version)
    else
      if not again then hand_over(tasks, batch) end
      count_ahead(batch)
      return {'batch', entry, batch, index, call('HGET', STATE, 'version'), again and 1 or 0}
    end
  end
end

local queued, running = call('XLEN', key('prompts')), call('SCARD', key('running'))
local waiting = call('ZCARD', key('ready')) + call('HLEN', key('cut'))
if call('HEXISTS', STATE, 'eod') == 1 and queued + running + waiting == 0 then return {'end'} end
local stopped = call('HGET', STATE, 'stopped')
if stopped then return {'stopped', stopped} end
if number('ahead', 0) >= capacity() then return {'blocked', call('HGET', STATE, 'version')} end
return {'empty'}
