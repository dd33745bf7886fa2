-- Prepended to the scripts that say `uses _reconcile`, after _batches.
local WHY = 'trained on, as the checkpoint says'

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
