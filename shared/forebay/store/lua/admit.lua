-- Starts queued groups, as many as the capacity rule lets: its check and the move are one step.
-- ARGV: most groups to start, group deadline ms. Returns {started, capacity left}.
local running = call('SCARD', key('running'))
local used = running + call('ZCARD', key('ready')) + call('HLEN', key('cut')) + number('ahead', 0)
local left = math.min((number('s', 0) + 1) * number('k', 1) * number('B', 1) - used, number('max_concurrent', 1) - running)
local want = math.min(left, tonumber(ARGV[1]))
if want <= 0 then return {0, left} end
local read = call('XREADGROUP', 'GROUP', 'admission', 'script', 'COUNT', want, 'STREAMS', key('prompts'), '>')
if not read then return {0, left} end
local now, started = now_ms(), 0
for _, entry in ipairs(read[1][2]) do
  local task = entry[2][2]
  local g = group_key(task)
  if call('HGET', g, 'st') == 'queued' then
    local deadline = now + tonumber(ARGV[2])
    call('HSET', g, 'st', 'running', 'run_at', now, 'dl', deadline)
    call('SADD', key('running'), task)
    call('ZADD', key('deadlines'), deadline, task)
    for idx = 0, tonumber(call('HGET', g, 'n')) - 1 do enqueue(task, idx, 1, now) end
    started = started + 1
  end
  call('XACK', key('prompts'), 'admission', entry[1])
  call('XDEL', key('prompts'), entry[1])
end
if started > 0 then count('started', started) end
return {started, left - started}
