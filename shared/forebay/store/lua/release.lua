-- A worker that shuts down hands an attempt back: it runs again at once, and no budget is touched.
-- ARGV: task, idx, attempt. Returns 1 if handed back.
local task, idx, attempt = ARGV[1], ARGV[2], ARGV[3]
local g = group_key(task)
if call('HGET', g, 'st') ~= 'running' or call('HEXISTS', g, 'd' .. idx) == 1 then return 0 end
if call('HGET', g, 'a' .. idx) ~= attempt then return 0 end
retire(task, idx, attempt)
enqueue(task, idx, tonumber(attempt) + 1, now_ms())
wake('jobs')
count('handed_back')
return 1
