-- Hands the next batch to a trainer. A batch that nobody has read is judged for freshness once more: if one of its
-- groups is stale it is dissolved, the fresh ones go back to ready. Once handed over it is frozen, for all ranks and
-- for followers, which get nothing before that. uses _batches
-- ARGV: cursor, reader, id of the last entry that this reader got, consumer, world size, 1 if it follows.
-- Returns {'batch', entry id, batch id, index, version, redelivered, missed}, {'end'} (end of data, nothing on its way),
-- {'stopped', reason} (the run has stopped itself), {'blocked', version, seen} (nothing can come before the version
-- moves), {'empty', seen}, or {'driven', driver} (another consumer drives the version). `seen` is the entry after which
-- there is something new; `missed` how many batches this follower was too slow for.
local name, reader, after, consumer, world, follows = ARGV[1], ARGV[2], ARGV[3], ARGV[4], ARGV[5], ARGV[6] == '1'
local stream = key('batches')
local driver = enter(consumer, follows)
if driver then return {'driven', driver} end
local rolled_back = call('HGET', STATE, 'rolled_back')
if rolled_back then return {'stopped', rolled_back} end -- what is cut may be what the trainer has had

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
  forget_entry(entry)
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

local function hand_over(tasks, batch, entry)
  call('HSET', batch_key(batch), 'st', 'delivered', 'e', entry)
  call('ZADD', KEPT, batch, batch)
  call('HINCRBY', STATE, 'cut_batches', -1)
  for _, task in ipairs(tasks) do
    call('HDEL', key('cut'), task)
    call('HSET', group_key(task), 'st', 'delivered')
    call('HDEL', group_key(task), 'spec', 'rules')
  end
  count('delivered', #tasks)
  count('batches_delivered')
end

-- Whether this consumer had the batch before, and the version that its ranks are told: all the same one, and that in
-- force where it comes again to the driver. A follower is told the driver's, and moves it for nobody.
local function note_reader(batch)
  local b, version = batch_key(batch), call('HGET', STATE, 'version')
  local again = call('HSETNX', b, 'to:' .. name, 1) == 0
  call('HSETNX', b, 'world:' .. consumer, world)
  local elsewhere = call('HGET', b, 'world:' .. consumer) ~= world
  if again and not follows then
    call('HSET', b, 'v', version)
  else
    call('HSETNX', b, 'v', version)
  end
  return (again or elsewhere) and 1 or 0, call('HGET', b, 'v')
end

-- A lost cursor (Redis has lost writes, or it was silent for too long) begins anew.
local function read_from(id)
  local function ask() return redis.pcall('XREADGROUP', 'GROUP', name, reader, 'COUNT', 1, 'STREAMS', stream, id) end
  local read = ask()
  if read and read.err and string.find(read.err, 'NOGROUP') then
    call('XGROUP', 'CREATE', stream, name, '0', 'MKSTREAM')
    read = ask()
  end
  if read and read.err then error(read.err) end
  return read
end

-- Whether the reader is beyond an entry: a cursor that began anew gives again what the reader still has in hand.
local function in_hand(entry)
  local ms, seq = string.match(entry, '^(%d+)-(%d+)$')
  local after_ms, after_seq = string.match(ARGV[3], '^(%d+)-(%d+)$')
  if not after_ms then return false end
  ms, seq, after_ms, after_seq = tonumber(ms), tonumber(seq), tonumber(after_ms), tonumber(after_seq)
  return ms < after_ms or (ms == after_ms and seq <= after_seq)
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
  local read = read_from(after)
  if not read or #read[1][2] == 0 then read = read_from('>') end
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
    forget_entry(entry)
  else
    local tasks = call('LRANGE', batch_key(batch) .. ':tasks', 0, -1)
    local again = call('HGET', batch_key(batch), 'st') == 'delivered'
    if follows and not again then return {'empty', after} end -- it may be dissolved yet
    local version = version_at_training(0)
    local stale = false
    if not again then
      for _, task in ipairs(tasks) do stale = stale or stale_at(task, version) end
    end
    if stale then
      dissolve(entry, batch, tasks, version)
    elseif call('HEXISTS', batch_key(batch), 'done:' .. consumer) == 1 then
      call('XACK', stream, name, entry) -- in another world of this consumer, or it is kept for others
    elseif not in_hand(entry) then
      if not again then hand_over(tasks, batch, entry) end
      if not follows then count_ahead(batch) end
      local redelivered, told = note_reader(batch)
      return {'batch', entry, batch, index, told, redelivered, call('HGET', MISSED, consumer) or 0}
    end
  end
end

local queued, running = call('XLEN', key('prompts')), call('SCARD', key('running'))
local waiting = call('ZCARD', key('ready')) + call('HLEN', key('cut'))
if call('HEXISTS', STATE, 'eod') == 1 and queued + running + waiting == 0 then return {'end'} end
local stopped = call('HGET', STATE, 'stopped')
if stopped then return {'stopped', stopped} end
local seen = cursors()[name] or after
-- What may still be in flight cannot make a batch: nothing comes before the version moves.
local left, size = capacity() - number('ahead', 0), number('B', 1)
local no_batch = call('HGET', STATE, 'dynamic') ~= '1' and number('cut_batches', 0) == 0 and left < size
  and call('ZCARD', key('ready')) < size
if not follows and (left <= 0 or no_batch) then return {'blocked', call('HGET', STATE, 'version'), seen} end
return {'empty', seen}
