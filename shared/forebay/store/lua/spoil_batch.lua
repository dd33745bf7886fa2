-- A batch that its reader cannot read: its groups are evicted, though they were counted as delivered at the hand-over,
-- and the trainer, who will not step for it, is not ahead by it. ARGV: consumer group, entry, batch, reason, sample.
-- Returns the groups that were evicted; 0 if the batch is gone already.
local name, entry, batch, reason = ARGV[1], ARGV[2], ARGV[3], ARGV[4]
local b = batch_key(batch)
if call('HGET', b, 'st') ~= 'delivered' then return 0 end
local evicted = 0
for _, task in ipairs(call('LRANGE', b .. ':tasks', 0, -1)) do
  if call('HGET', group_key(task), 'st') == 'delivered' then
    bury(task, 'evicted', 'unreadable: ' .. reason, 'hand-over', 'unreadable', reason)
    tell_dump(task)
    evicted = evicted + 1
  end
end
count('evicted', evicted)
count('delivered', -evicted)
if call('HGET', b, 'counted') == tostring(number('recoveries', 0)) then
  call('HSET', STATE, 'ahead', math.max(0, number('ahead', 0) - number('B', 1)))
end
call('UNLINK', b, b .. ':tasks')
call('XACK', key('batches'), name, entry)
call('XDEL', key('batches'), entry)
set_aside('batch:' .. batch, 'batches', reason, ARGV[5])
count('batches_set_aside')
wake('admission')
return evicted
