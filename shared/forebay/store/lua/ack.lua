-- The trainer is done with a batch: its rows go, once nobody needs them any more. uses _batches
-- ARGV: cursor, batch id, consumer, world size, 1 if it follows.
-- Returns {1 the first time, batches that went because too many bytes were kept ...}.
local cursor, batch, consumer, world = ARGV[1], ARGV[2], ARGV[3], tonumber(ARGV[4])
local b = batch_key(batch)
if call('HEXISTS', b, 'to:' .. cursor) == 0 or call('HEXISTS', b, 'done:' .. consumer) == 1 then return {0} end
if ARGV[5] == '1' then call('ZADD', FOLLOWERS, now_ms(), consumer) end
if call('HSETNX', b, 'ack:' .. cursor, 1) == 0 then return {0} end
if call('HINCRBY', b, 'acks:' .. consumer .. '/' .. world, 1) < world then return {1} end
finish(batch, consumer)
return {1, unpack(tidy())}
