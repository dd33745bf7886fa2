-- Starts queued groups, as many as the capacity rule lets: its check and the move are one step. Groups that are asked
-- for by their id, evaluations among them, are outside the capacity and have a bound of their own.
-- ARGV: most groups to start, group deadline ms. Returns {started, capacity left}. uses _bounds
-- Refused when memory is short.
if call('HEXISTS', STATE, 'stopped') == 1 then return {0, 0} end
local most, deadline_ms = tonumber(ARGV[1]), tonumber(ARGV[2])

-- What is wrong with an entry of the stream; nil: it names a group that can be started, or one that needs no start.
local function fault_of(task)
  if not task or not string.match(task, '^%d+$') then return 'it names no task id' end
  local state = redis.pcall('HGET', group_key(task), 'st')
  if type(state) == 'table' then return 'its group is no hash' end
  if not state then return 'there is no such group' end
  if state == 'queued' and not string.match(call('HGET', group_key(task), 'n') or '', '^[1-9]%d?%d?%d?%d?$') then
    return 'its group has no size'
  end
end

local function leave_queue(task, direct)
  local g = group_key(task)
  call('HINCRBY', STATE, queued_bytes(direct), 0 - call('HSTRLEN', g, 'spec') - call('HSTRLEN', g, 'rules'))
end

-- A submitted group that cannot be started has ended: rejected.
local function refuse(entry, stream, task, fault)
  set_aside(stream .. ':' .. entry[1], 'prompts', fault, table.concat(entry[2], ' '))
  if fault == 'its group has no size' then
    leave_queue(task, stream == 'prompts' and '' or 'direct')
    bury(task, 'rejected', 'contract_error', 'admission', 'contract_error', fault)
    count('rejected')
    count('rejected:contract_error')
  end
end

-- Groups start while there is room for their results. `needed` of them do although there is none for their rows: those
-- that the next batch is made of, or somebody waits for. Without them nothing would free any.
local max_rows, expected, slot = number('max_rows', 0), expected_rows(), slot_bytes()
local held_by = ''

-- What the next group of the stream will bring.
local function next_bytes(stream)
  local entry = call('XRANGE', key(stream), '-', '+', 'COUNT', 1)[1]
  local task = entry and named(entry[2]).t
  local size = task and redis.pcall('HGET', group_key(task), 'n')
  return (type(size) == 'string' and tonumber(size) or 1) * slot
end

local function room_for_more(stream, started, needed)
  if results_full() then
    held_by = 'unread_results'
  elseif max_rows > 0 and started >= needed and expected + next_bytes(stream) > max_rows then
    held_by = 'rows_bytes'
  else
    return true
  end
  return false
end

local function start(stream, running, want, needed)
  local now, started = now_ms(), 0
  for _ = 1, want do
    if not room_for_more(stream, started, needed) then break end
    local read = call('XREADGROUP', 'GROUP', 'admission', 'script', 'COUNT', 1, 'STREAMS', key(stream), '>')
    if not read then
      if call('XLEN', key(stream)) == 0 then call('HDEL', STATE, queued_bytes(stream == 'prompts' and '' or 'direct')) end
      break
    end
    local entry = read[1][2][1]
    local task = named(entry[2]).t
    local g = group_key(task or '')
    local fault = fault_of(task)
    if fault then
      refuse(entry, stream, task, fault)
    elseif call('HGET', g, 'st') == 'queued' then
      local size = tonumber(call('HGET', g, 'n'))
      call('HSET', g, 'st', 'running', 'run_at', now, 'dl', now + deadline_ms)
      call('SADD', key(running), task)
      call('ZADD', key('deadlines'), now + deadline_ms, task)
      for idx = 0, size - 1 do enqueue(task, idx, 1, now) end
      leave_queue(task, stream == 'prompts' and '' or 'direct')
      expected = expected + size * slot
      started = started + 1
    end
    call('XACK', key(stream), 'admission', entry[1])
    call('XDEL', key(stream), entry[1])
  end
  if started > 0 then count('started', started) end
  return started
end

local running, waiting, size = call('SCARD', key('running')), call('ZCARD', key('ready')), number('B', 1)
local used = running + waiting + cut_ahead() + number('ahead', 0)
local left = math.min(capacity() - used, number('max_concurrent', 1) - running)
local needed = number('cut_batches', 0) == 0 and size - running - waiting or 0
local started = start('prompts', 'running', math.min(left, most), needed)
local direct_running = call('SCARD', key('running:direct'))
local direct_left = number('max_direct', 0) - direct_running
local direct = start('prompts:direct', 'running:direct', math.min(direct_left, most), size - direct_running)
if (call('HGET', STATE, 'held_by') or '') ~= held_by then call('HSET', STATE, 'held_by', held_by) end
if started + direct > 0 then wake('jobs') end
return {started + direct, left - started}
