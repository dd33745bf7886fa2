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
      evict(task, version)
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

for _ = 1, 1000 do
  -- First what this reader was given and, for want of an answer or of an ack, may not know; then what is new.
  local read = call('XREADGROUP', 'GROUP', name, consumer, 'COUNT', 1, 'STREAMS', stream, after)
  if not read or #read[1][2] == 0 then
    read = call('XREADGROUP', 'GROUP', name, consumer, 'COUNT', 1, 'STREAMS', stream, '>')
  end
  if not read then break end
  local entry, fields = read[1][2][1][1], read[1][2][1][2]
  if not fields or #fields == 0 then -- deleted while pending
    call('XACK', stream, name, entry)
    after = entry
  else
    local batch, index = fields[2], fields[4]
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
-- What may still be in flight cannot make a batch: nothing comes before the version moves.
local dynamic = call('HGET', STATE, 'dynamic') == '1'
if number('ahead', 0) >= capacity() or (not dynamic and number('cut_batches', 0) == 0
    and capacity() - number('ahead', 0) < number('B', 1) and call('ZCARD', key('ready')) < number('B', 1)) then return {'blocked', call('HGET', STATE, 'version')} end
return {'empty'}
