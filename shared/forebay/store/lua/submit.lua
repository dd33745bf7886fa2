-- Enqueues a prompt group, once for each idempotency key.
-- ARGV: idempotency key, its ttl s, spec, group size, rules. Returns {task_id, 'created' | 'exists'} or {'full', queued}.
local idem = key('submitted:' .. ARGV[1])
local known = call('GET', idem)
if known then return {known, 'exists'} end
local queued = call('XLEN', key('prompts'))
if queued >= number('max_queued', 10000) then return {'full', tostring(queued)} end
local task = call('HINCRBY', STATE, 'task_seq', 1)
call('SET', idem, task, 'EX', ARGV[2])
call('HSET', group_key(task), 'st', 'queued', 'n', ARGV[4], 'spec', ARGV[3], 'rules', ARGV[5], 'at', now_ms())
call('XADD', key('prompts'), '*', 't', task)
call('HDEL', STATE, 'eod') -- whoever submits after the end of data opens it again
count('submitted')
wake('admission')
return {tostring(task), 'created'}
