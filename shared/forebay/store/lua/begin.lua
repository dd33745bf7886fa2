-- A worker asks whether an attempt is still wanted, and takes its lease.
-- ARGV: task, idx, attempt, worker, lease ms. Returns {'run', spec, group size, deadline ms, now ms} or {reason}.
-- The job leaves arq's queue here: from now on the lease stands for it, and idle workers do not skip over it.
local task, idx, attempt, worker = ARGV[1], ARGV[2], ARGV[3], ARGV[4]
local g = group_key(task)
if call('HGET', g, 'st') ~= 'running' then return {'ended'} end
if call('HEXISTS', g, 'd' .. idx) == 1 then return {'filled'} end
if call('HGET', g, 'a' .. idx) ~= attempt then return {'superseded'} end
local leased = call('ZSCORE', key('leases'), member(task, idx, attempt))
if leased and call('HGET', g, 'w' .. idx) ~= worker then return {'leased'} end
local now = now_ms()
call('ZADD', key('leases'), now + tonumber(ARGV[5]), member(task, idx, attempt))
call('HSET', g, 'w' .. idx, worker)
local id = job_id(task, idx, attempt)
call('ZREM', key('jobs'), id)
call('UNLINK', 'arq:job:' .. id)
return {'run', call('HGET', g, 'spec'), call('HGET', g, 'n'), call('HGET', g, 'dl'), tostring(now)}
