-- Prepended to the scripts that say `uses _batches`: for whom a handed-over batch is kept, and when it goes.
-- A consumer has one cursor for each rank of its world, named CONSUMER or CONSUMER/RANK/WORLD; a cursor is a consumer
-- group of the stream. One consumer drives the version, the others follow it. The hash of a batch knows: `to:CURSOR`,
-- it was handed to it; `ack:CURSOR`; `acks:CONSUMER/WORLD`, how many ranks have acknowledged it; `done:CONSUMER`, all
-- ranks of one of its worlds have. An entry stays pending for all ranks until the batch is done, so that ranks that
-- begin again together get the same batches, whichever of them had acknowledged.
local BATCHES, KEPT, GONE = key('batches'), key('batches:kept'), key('batches:gone')
local FOLLOWERS, MISSED = key('followers'), key('followers:missed')
local MAX_GONE = 1000

local function consumer_of(cursor) return string.match(cursor, '^[^/]+') end

-- All cursors on the stream, with the last entry that each was given.
local function cursors()
  local found, out = redis.pcall('XINFO', 'GROUPS', BATCHES), {}
  if found.err then return out end -- there is no stream yet
  for _, group in ipairs(found) do
    local about = {}
    for at = 1, #group, 2 do about[group[at]] = group[at + 1] end
    out[about['name']] = about['last-delivered-id']
  end
  return out
end

-- The consumer takes part: the first that does not follow drives. Returns the driver where that cannot be.
local function enter(consumer, follows)
  local driver = call('HGET', STATE, 'driver')
  if follows then
    if driver == consumer then return driver end
    call('ZADD', FOLLOWERS, now_ms(), consumer)
  elseif not driver then
    call('HSET', STATE, 'driver', consumer)
    call('ZREM', FOLLOWERS, consumer)
  elseif driver ~= consumer then
    return driver
  end
end

local function forget_entry(entry)
  for cursor in pairs(cursors()) do call('XACK', BATCHES, cursor, entry) end
  call('XDEL', BATCHES, entry)
end

local function bytes_of(batch)
  local sum = 0
  for _, task in ipairs(call('LRANGE', batch_key(batch) .. ':tasks', 0, -1)) do
    local g = group_key(task)
    for idx = 0, (tonumber(call('HGET', g, 'n')) or 0) - 1 do
      local attempt = call('HGET', g, 'd' .. idx)
      if attempt then sum = sum + call('STRLEN', rows_key(task, idx, attempt)) end
    end
  end
  return sum
end

-- All ranks of the consumer are done with the batch.
local function finish(batch, consumer)
  local b = batch_key(batch)
  call('HSET', b, 'done:' .. consumer, 1)
  local entry = call('HGET', b, 'e')
  for cursor in pairs(cursors()) do
    if consumer_of(cursor) == consumer then call('XACK', BATCHES, cursor, entry) end
  end
  if consumer == call('HGET', STATE, 'driver') and call('HSETNX', b, 'bytes', bytes_of(batch)) == 1 then
    count('batches_acked') -- once, however often a trainer goes back to it
    -- What is kept from now on has a budget of its own.
    for _, task in ipairs(call('LRANGE', b .. ':tasks', 0, -1)) do uncount(task, 'rb', 'rows_bytes') end
  end
end

local function remove_batch(batch, followers)
  local b = batch_key(batch)
  for _, follower in ipairs(followers) do
    if call('HEXISTS', b, 'done:' .. follower) == 0 then
      call('HINCRBY', MISSED, follower, 1)
      count('batches_missed')
    end
  end
  for _, task in ipairs(call('LRANGE', b .. ':tasks', 0, -1)) do bury(task, 'delivered', 'batch ' .. batch) end
  forget_entry(call('HGET', b, 'e'))
  call('UNLINK', b, b .. ':tasks')
  call('ZREM', KEPT, batch)
  call('ZADD', GONE, batch, batch)
  call('ZREMRANGEBYRANK', GONE, 0, -MAX_GONE - 1)
end

-- Followers that have been silent for too long do not count any more, and their cursors go.
local function live_followers()
  local silent = call('ZRANGEBYSCORE', FOLLOWERS, '-inf', now_ms() - number('follower_ttl_ms', 3600000))
  for _, follower in ipairs(silent) do
    call('ZREM', FOLLOWERS, follower)
    call('HDEL', MISSED, follower)
    for cursor in pairs(cursors()) do
      if consumer_of(cursor) == follower then call('XGROUP', 'DESTROY', BATCHES, cursor) end
    end
  end
  return call('ZRANGE', FOLLOWERS, 0, -1)
end

-- Batches go that the driver is done with, but for the last `retain` ones and for those that a follower has yet to
-- read. A follower that is too far behind misses some. Returns those that went because those kept had too many bytes.
local function tidy()
  local driver, followers = call('HGET', STATE, 'driver'), live_followers()
  if not driver then return {} end
  local retain, budget = number('retain', 0), number('retain_bytes', 0)
  local lag = math.max(retain, number('follower_lag', 100))
  local done, kept, bytes, dropped = {}, {}, 0, {}
  for _, batch in ipairs(call('ZRANGE', KEPT, 0, -1)) do
    if call('HEXISTS', batch_key(batch), 'done:' .. driver) == 1 then done[#done + 1] = batch end
  end
  local function awaited(batch)
    for _, follower in ipairs(followers) do
      if call('HEXISTS', batch_key(batch), 'done:' .. follower) == 0 then return true end
    end
  end
  for at, batch in ipairs(done) do
    local newer = #done - at
    if newer < retain or (newer < lag and awaited(batch)) then
      kept[#kept + 1] = batch
      bytes = bytes + (tonumber(call('HGET', batch_key(batch), 'bytes')) or 0)
    else
      remove_batch(batch, followers)
    end
  end
  for _, batch in ipairs(kept) do
    if budget == 0 or bytes <= budget then break end
    bytes = bytes - (tonumber(call('HGET', batch_key(batch), 'bytes')) or 0)
    remove_batch(batch, followers)
    count('batches_dropped')
    dropped[#dropped + 1] = batch
  end
  call('HSET', STATE, 'kept_bytes', bytes)
  return dropped
end
