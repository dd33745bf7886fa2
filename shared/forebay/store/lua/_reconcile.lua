-- Prepended to the scripts that say `uses _reconcile`, after _batches.
local WHY = 'trained on, as the checkpoint says'

-- The rows of a group are counted as kept for the trainer, where they are not, as those of an acknowledged batch.
local function count_rows(task)
  local g, bytes = group_key(task), 0
  if call('HEXISTS', g, 'rb') == 1 then return end
  for idx = 0, tonumber(call('HGET', g, 'n')) - 1 do
    local attempt = call('HGET', g, 'd' .. idx)
    if attempt then bytes = bytes + call('STRLEN', rows_key(task, idx, attempt)) end
  end
  call('HSET', g, 'rb', bytes)
  call('HINCRBY', STATE, 'rows_bytes', bytes)
end

-- The groups of a batch that is not to be had any more wait for another one, but for those that are gone from it.
local function undo_batch(batch, was_delivered)
  local b, undone = batch_key(batch), {}
  for _, task in ipairs(call('LRANGE', b .. ':tasks', 0, -1)) do
    local g = group_key(task)
    local state, own = unpack(call('HMGET', g, 'st', 'batch'))
    if own == batch and (state == 'batched' or state == 'delivered') then
      call('HDEL', key('cut'), task)
      call('HDEL', g, 'batch', 'trained')
      call('HSET', g, 'st', 'ready')
      count_rows(task)
      call('ZADD', key('ready'), call('HGET', g, 'seq'), task)
      if was_delivered then count('delivered', -1) end
      undone[#undone + 1] = task
    end
  end
  forget_entry(call('HGET', b, 'e'))
  call('UNLINK', b, b .. ':tasks')
  call('ZREM', KEPT, batch)
  if not was_delivered then call('HINCRBY', STATE, 'cut_batches', -1) end
  count('batches_dissolved')
  return undone
end
