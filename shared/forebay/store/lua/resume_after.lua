-- A trainer begins again from a checkpoint that names the last batch it was trained on: it is done with that one and
-- those before; later ones come again to this cursor, those that it had acknowledged too. uses _batches
-- ARGV: cursor, consumer, world size, 1 if it follows, batch id. Each rank calls it for itself, before it reads.
-- Returns {'ok'}, {'driven', driver}, {'unknown', last batch id}, {'unread', batch id} or {'gone', batch id}; nothing
-- has changed unless it is ok.
local cursor, consumer, world, id = ARGV[1], ARGV[2], ARGV[3], tonumber(ARGV[5])
local driver = enter(consumer, ARGV[4] == '1')
if driver then return {'driven', driver} end
local last = number('batch_seq', 0)
if id > last then return {'unknown', tostring(last)} end
for _, batch in ipairs(call('HVALS', key('cut'))) do
  if tonumber(batch) <= id then return {'unread', batch} end
end
local gone = call('ZRANGEBYSCORE', GONE, '(' .. id, '+inf', 'LIMIT', 0, 1)
if gone[1] then return {'gone', gone[1]} end

local function world_of(name) return string.match(name, '/(%d+)$') or '1' end

local function of_another_world(name) return consumer_of(name) == consumer and world_of(name) ~= world end

-- The batch comes again. What other worlds had acknowledged of it counts no more: they, too, would begin anew.
local function reopen(b)
  call('HDEL', b, 'done:' .. consumer)
  if call('HDEL', b, 'ack:' .. cursor) == 1 then call('HINCRBY', b, 'acks:' .. consumer .. '/' .. world, -1) end
  for _, field in ipairs(call('HKEYS', b)) do
    local kind, name = string.match(field, '^(acks?):(.*)$')
    if kind and of_another_world(name) then call('HDEL', b, field) end
  end
end

for _, batch in ipairs(call('ZRANGE', KEPT, 0, -1)) do
  local b = batch_key(batch)
  if tonumber(batch) > id then
    reopen(b)
  elseif call('HEXISTS', b, 'done:' .. consumer) == 0 then
    finish(batch, consumer)
  end
end
for name in pairs(cursors()) do
  if name == cursor or of_another_world(name) then call('XGROUP', 'DESTROY', BATCHES, name) end
end
call('XGROUP', 'CREATE', BATCHES, cursor, '0', 'MKSTREAM')
tidy()
return {'ok'}
