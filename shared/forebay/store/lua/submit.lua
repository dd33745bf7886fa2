-- Enqueues a prompt group, once for each idempotency key.
-- ARGV: idempotency key, its ttl s, spec, group size, rules, channel: '' (batches), 'direct' or 'eval',
-- what the prompt is called in ledgers.
-- Returns {task_id, 'created' | 'exists'}, {'stopped', reason}, or what `queue_full` gives. uses _bounds
-- Refused when memory is short.
local idem, direct = key('submitted:' .. ARGV[1]), ARGV[6]
local known = call('GET', idem)
if known then return {known, 'exists'} end
local stopped = call('HGET', STATE, 'stopped')
if stopped then return {'stopped', stopped} end
local full = queue_full(direct, #ARGV[3] + #ARGV[5])
if full then return full end
local task = put_in_queue(ARGV[3], ARGV[5], ARGV[4], direct, 'key', ARGV[7])
call('SET', idem, task, 'EX', ARGV[2])
if direct == '' then call('HDEL', STATE, 'eod') end -- whoever submits after the end of data opens it again
count('submitted')
return {tostring(task), 'created'}
