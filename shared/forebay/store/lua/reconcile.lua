-- The run goes on from the trainer's checkpoint, after take_back.lua has seen what it was trained on. Where Redis had gone
-- back in time, all sequences are moved above whatever was ever seen, so that no id names two things. uses _batches
-- uses _partitions
-- uses _reconcile
-- ARGV: version, id of the last batch trained on, consumer, 1 if batches up to that one count as trained on whole.
-- Returns {1 if Redis had gone back, task ids of handed-over batches that wait for another batch ...}. Repeating it
-- changes nothing.
local version, last, whole = tonumber(ARGV[1]), tonumber(ARGV[2]), ARGV[4] == '1'
local STEPS = {task_seq = 1000000, commit_seq = 1000000, batch_seq = 1000, epoch = 1000}
local driver = call('HGET', STATE, 'driver') or ARGV[3]
local reason = call('HGET', STATE, 'rolled_back')
local out = {reason and 1 or 0}

-- A number above all that can have been given out, by those too whom nobody here has heard of.
local function above(seen, step) return string.format('%d', (math.floor(seen / step) + 2) * step) end

local function move(field, step)
  call('HSET', STATE, field, above(math.max(number(field, 0), number('seen:' .. field, 0)), step))
end

if reason then -- an unread batch may have been cut, under an id that was taken, before anybody knew
  local unread = {}
  for _, batch in ipairs(call('HVALS', key('cut'))) do unread[batch] = true end
  for batch in pairs(unread) do undo_batch(batch, false) end
end

-- The batch comes again to all ranks of the trainer.
local function reopen(b)
  call('HDEL', b, 'done:' .. driver)
  for _, field in ipairs(call('HKEYS', b)) do
    local name = string.match(field, '^acks?:(.*)$')
    if name and consumer_of(name) == driver then call('HDEL', b, field) end
  end
end

for _, batch in ipairs(call('ZRANGE', KEPT, 0, -1)) do
  local b, trained, others = batch_key(batch), {}, 0
  for _, task in ipairs(call('LRANGE', b .. ':tasks', 0, -1)) do
    if (whole and tonumber(batch) <= last) or call('HEXISTS', group_key(task), 'trained') == 1 then
      trained[#trained + 1] = task
    else
      others = others + 1
    end
  end
  if others == 0 then
    if call('HEXISTS', b, 'done:' .. driver) == 0 then finish(batch, driver) end
  elseif #trained == 0 and tonumber(batch) > last then
    reopen(b)
  else -- what it is frozen as cannot be handed over: a part was trained on, or its id is another batch's
    for _, task in ipairs(trained) do bury(task, 'delivered', WHY) end
    for _, task in ipairs(undo_batch(batch, true)) do out[#out + 1] = task end
  end
end
for name in pairs(cursors()) do -- made anew by who reads next
  if consumer_of(name) == driver then call('XGROUP', 'DESTROY', BATCHES, name) end
end
call('ZREMRANGEBYSCORE', GONE, '(' .. last, '+inf') -- their prompts are submitted again, so nothing is missing
tidy()

if number('version', 0) ~= version or number('ahead', 0) ~= 0 then
  call('HSET', STATE, 'version', version, 'ahead', 0)
  call('HINCRBY', STATE, 'recoveries', 1)
end
if reason then
  for field, step in pairs(STEPS) do move(field, step) end
  for p = 0, math.max(number('P', 1), number('P_max', 1)) - 1 do -- whoever owned it changes nothing in it any more
    local epoch = 'epoch:' .. p
    call('HSET', PARTITIONS, epoch, above(tonumber(call('HGET', PARTITIONS, epoch)) or 0, STEPS.epoch))
    call('HDEL', PARTITIONS, 'owner:' .. p)
    call('DEL', partition_lease(p))
  end
  call('HSET', STATE, 'reconciled', math.max(number('reconciled', 0), number('seen:reconciled', 0)) + 1)
  call('HSET', STATE, 'recoveries', math.max(number('recoveries', 0), number('seen:recoveries', 0)) + 1)
  if call('HGET', STATE, 'stopped') == reason then call('HDEL', STATE, 'stopped') end
  for _, field in ipairs(call('HKEYS', STATE)) do
    if string.find(field, '^seen:') then call('HDEL', STATE, field) end
  end
  call('HDEL', STATE, 'rolled_back', 'leader')
  call('DEL', key('lease:collector'))
  count('reconciled')
end
wake('admission')
wake('cutter')
wake('jobs')
return out
