-- A batch that its reader cannot read: its groups are evicted, though they were counted as delivered at the hand-over,
-- and the trainer, who will not step for it, is not ahead by it. uses _batches
-- ARGV: cursor, entry, batch, reason, sample, consumer.
-- Returns the groups that were evicted; 0 if the batch is gone already; -1, and nothing has changed, where it is not this
-- reader's to decide: a follower's, or that of one rank of which another has the batch and may step for it.
local name, entry, batch, reason, consumer = ARGV[1], ARGV[2], ARGV[3], ARGV[4], ARGV[6]
local b = batch_key(batch)
if call('HGET', b, 'st') ~= 'delivered' then return 0 end
if call('HGET', STATE, 'driver') ~= consumer then return -1 end
local function world_of(cursor) return string.match(cursor, '/(%d+)$') or '1' end
for _, field in ipairs(call('HKEYS', b)) do
  local reader = string.match(field, '^to:(.*)$')
  if reader and reader ~= name and consumer_of(reader) == consumer and world_of(reader) == world_of(name) then return -1 end
end
local evicted = 0
for _, task in ipairs(call('LRANGE', b .. ':tasks', 0, -1)) do
  if call('HGET', group_key(task), 'st') == 'delivered' then
    bury(task, 'evicted', 'unreadable: ' .. reason, 'hand-over', 'unreadable', reason)
    tell_dump(task)
    evicted = evicted + 1
  end
end
count('evicted', evicted)
count('delivered', 0 - evicted)
if call('HGET', b, 'counted') == tostring(number('recoveries', 0)) then
  call('HSET', STATE, 'ahead', math.max(0, number('ahead', 0) - number('B', 1)))
end
call('UNLINK', b, b .. ':tasks')
call('ZREM', KEPT, batch)
forget_entry(entry)
set_aside('batch:' .. batch, 'batches', reason, ARGV[5])
count('batches_set_aside')
wake('admission')
return evicted
