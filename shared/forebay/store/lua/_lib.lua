-- Prepended to every script. KEYS[1] is the run's key prefix, which carries the hash tag; all names derive from it,
-- as in store/keys.py. Times are the server's, in ms, so that hosts with different clocks agree on leases.
local prefix = KEYS[1]
local tag = string.match(prefix, '{.-}')
local call = redis.call

local function key(name) return prefix .. name end
local function group_key(task) return prefix .. 'group:' .. task end
local function rows_key(task, idx, attempt) return prefix .. 'rows:' .. task .. ':' .. idx .. ':' .. attempt end
local function batch_key(batch) return prefix .. 'batch:' .. batch end
local function job_id(task, idx, attempt) return tag .. ':' .. task .. ':' .. idx .. ':' .. attempt end
local function member(task, idx, attempt) return task .. ':' .. idx .. ':' .. attempt end

local STATE, COUNTERS = key('state'), key('counters')
local TOMBSTONE_S = 3600
local JOB_TTL_MS = 7 * 86400 * 1000
local MAX_BACKOFF_MS = 30000
local MAX_DETAIL = 300
local MAX_SET_ASIDE = 1000
local MAX_SAMPLE = 64

local function now_ms()
  local t = call('TIME')
  return t[1] * 1000 + math.floor(t[2] / 1000)
end

local function number(field, default)
  return tonumber(call('HGET', STATE, field)) or default
end

local function count(name, by) call('HINCRBY', COUNTERS, name, by or 1) end

local function wake(name)
  local k = key('wake:' .. name)
  if call('LLEN', k) == 0 then call('LPUSH', k, '1') end
end

-- A collector that lost its lease carries an old epoch and may change nothing.
local function fenced(epoch) return call('HGET', STATE, 'epoch') ~= epoch end

-- arq's job record as its msgpack serializer would write it: {t: nil, f: 'run_slot', a: [], k: {}, et: ms}.
local function enqueue(task, idx, attempt, at_ms)
  local id = job_id(task, idx, attempt)
  local record = '\133\161t\192\161f\168run_slot\161a\144\161k\128\162et' .. cmsgpack.pack(now_ms())
  call('SET', 'arq:job:' .. id, record, 'PX', JOB_TTL_MS)
  call('ZADD', key('jobs'), at_ms, id)
  call('HSET', group_key(task), 'a' .. idx, attempt)
end

-- Takes an attempt out of the queue and out of the leases, so that nothing starts or counts it any more.
local function retire(task, idx, attempt)
  local id = job_id(task, idx, attempt)
  call('ZREM', key('leases'), member(task, idx, attempt))
  call('ZREM', key('jobs'), id)
  call('UNLINK', 'arq:job:' .. id, 'arq:in-progress:' .. id, 'arq:retry:' .. id)
end

-- Counts a failure against the slot's budget of its kind: 'retry' (the next attempt is queued) or 'final'.
local function fail_attempt(task, idx, attempt, kind, now)
  retire(task, idx, attempt)
  local fails = call('HINCRBY', group_key(task), 'f' .. idx .. ':' .. kind, 1)
  if fails >= number('attempts:' .. kind, 1) then return 'final' end
  local wait = math.min(number('backoff_ms', 500) * 2 ^ (fails - 1), MAX_BACKOFF_MS)
  enqueue(task, idx, attempt + 1, now + wait)
  if wait < 100 then wake('jobs') end
  count('retries:' .. kind)
  return 'retry'
end

-- Every worker beats three times a lease. If none has for two thirds of one, Redis was away, and nobody could renew: so
-- for as long as it takes the workers to find it again, no lease is held to have been lost. If they are all dead the
-- same costs little: a lease and three seconds after the last beat the slots run again all the same. Once a silence.
local function spare_after_silence(now, lease)
  local newest = call('ZREVRANGE', key('workers:seen'), 0, 0, 'WITHSCORES')[2]
  if newest and now - tonumber(newest) > lease * 2 / 3 and call('HGET', STATE, 'silence') ~= newest then
    call('HSET', STATE, 'silence', newest, 'spare_until', math.floor(now + lease / 3 + 2000))
  end
end

-- The results of a group go to the partition that it was given when it was put in the queue.
local function partition_of(task) return call('HGET', group_key(task), 'p') or '0' end

-- Records the one outcome of a slot.
local function settle(task, idx, attempt, header)
  local entry = call('XADD', key('results:' .. partition_of(task)), '*', 't', task, 'i', idx, 'h', header)
  call('HSET', group_key(task), 'd' .. idx, attempt, 'e' .. idx, entry)
  call('HINCRBY', group_key(task), 'hb', #header)
  call('HINCRBY', STATE, 'results_bytes', #header)
end

-- The attempt that a slot is filled with by nobody: a result that comes late is then a duplicate, not a repeated call.
local NOBODY = 0

local function failure(task, idx, attempt, kind, reason)
  return cmsgpack.pack({task = tonumber(task), idx = tonumber(idx), attempt = tonumber(attempt),
                        outcome = 'failed', kind = kind, reason = reason})
end

-- Ends the open slots of a group as failed(timeout): those, with the attempt that each was at and its header.
local function close_slots(task, reason)
  local g, closed = group_key(task), {}
  for idx = 0, tonumber(call('HGET', g, 'n')) - 1 do
    local slot = call('HMGET', g, 'd' .. idx, 'a' .. idx)
    if not slot[1] then
      retire(task, idx, slot[2])
      local header = failure(task, idx, slot[2], 'timeout', reason)
      settle(task, idx, NOBODY, header)
      count('slots:failed')
      closed[#closed + 1] = {idx = idx, attempt = slot[2], header = header}
    end
  end
  return closed
end

-- Stops the run: nothing more is admitted or claimed, and readers are told why, until somebody resumes it.
local function stop_run(reason)
  if call('HSETNX', STATE, 'stopped', reason) == 1 then count('stops') end
end

-- One more of something bad in a row: past `most` of them the run stops, with the first one's reason.
local function one_in_a_row(row, reason, most, what)
  call('HSETNX', STATE, 'streak:' .. row .. ':first', reason)
  local streak = call('HINCRBY', STATE, 'streak:' .. row, 1)
  if streak >= most then
    stop_run(streak .. ' ' .. what .. '; the first: ' .. call('HGET', STATE, 'streak:' .. row .. ':first'))
  end
end

local function end_row(row) call('HDEL', STATE, 'streak:' .. row, 'streak:' .. row .. ':first') end

-- A slot has failed for good. The share of such slots among the last ones is a decaying mean over about `window` of
-- them, so that only failures pay for it. Contract errors count in a row besides.
local function note_failure(kind, reason)
  if kind == 'contract' then
    one_in_a_row('slots', reason, number('max_contract_errors', 8),
      'slots in a row broke the contract (max_contract_errors)')
  else
    end_row('slots')
  end
  local limit = number('share:' .. kind, 1)
  if limit >= 1 then return end
  local keep = 1 - 1 / number('window', 100)
  local ended = 0
  for _, total in ipairs(call('HMGET', COUNTERS, 'slots:usable', 'slots:rejected', 'slots:failed')) do
    ended = ended + (tonumber(total) or 0)
  end
  local at = number('failed:' .. kind .. ':at', ended)
  local share = number('failed:' .. kind, 0) * keep ^ (ended - at) + 1 - keep
  if share < 2 * (1 - keep) then call('HSET', STATE, 'failed:' .. kind .. ':first', reason) end
  call('HSET', STATE, 'failed:' .. kind, tostring(share), 'failed:' .. kind .. ':at', ended)
  if share >= limit then
    stop_run(math.floor(share * 100) .. '% of the last slots failed with kind ' .. kind .. ' (max_failed_share_' .. kind
      .. '); the first: ' .. (call('HGET', STATE, 'failed:' .. kind .. ':first') or reason))
  end
end

-- The bytes of a group that are counted in a sum of the run's state count there no more. The group itself knows how
-- many they are, so nothing is taken off twice, and nothing stays.
local function uncount(task, field, sum)
  local bytes = tonumber(call('HGET', group_key(task), field))
  if not bytes then return end
  call('HDEL', group_key(task), field)
  call('HINCRBY', STATE, sum, 0 - bytes) -- not -bytes: Redis takes no -0
  wake('admission')
end

local function unlink_rows(task)
  local g = group_key(task)
  uncount(task, 'rb', 'rows_bytes')
  for idx = 0, (tonumber(call('HGET', g, 'n')) or 0) - 1 do
    local attempt = call('HGET', g, 'd' .. idx)
    if attempt then call('UNLINK', rows_key(task, idx, attempt)) end
  end
end

-- Something in Redis that no reader can read is set aside: what, where, why and its first bytes, once for each id.
-- Returns 1 the first time.
local function set_aside(id, where, reason, sample)
  local now = now_ms()
  local about = cmsgpack.pack({where = where, reason = string.sub(reason, 1, MAX_DETAIL), at = now,
                               sample = string.sub(sample or '', 1, MAX_SAMPLE)})
  if call('HSETNX', key('poison:about'), id, about) == 0 then return 0 end
  call('ZADD', key('poison'), now, id)
  while call('ZCARD', key('poison')) > MAX_SET_ASIDE do
    call('HDEL', key('poison:about'), call('ZPOPMIN', key('poison'))[1])
  end
  count('poison')
  count('poison:' .. where)
  return 1
end

-- The fields of a stream's entry by name.
local function named(fields)
  local out = {}
  for at = 1, #fields, 2 do out[fields[at]] = fields[at + 1] end
  return out
end

-- The drop ledger: one entry for each group that does not reach a trainer, whose id has the time. It is no stream of
-- deliveries, so it is trimmed as it grows.
local function note_drop(task, outcome, place, reason, detail, child)
  local most = number('drops_max', 100000)
  if most < 1 then return end
  local parent, label = unpack(call('HMGET', group_key(task), 'parent', 'key'))
  call('XADD', key('drops'), 'MAXLEN', most, '*', 't', task, 'o', outcome, 'p', place, 'r', reason,
    'd', string.sub(detail or '', 1, MAX_DETAIL), 'parent', parent or '', 'child', child or '', 'key', label or '')
end

-- Dead letters: what is known of slots that failed for good, by group, with what the group needs to run again.
local function dead_key(task) return prefix .. 'dead:' .. task end

local function forget_letter(task)
  call('HINCRBY', STATE, 'dead_bytes', 0 - (tonumber(call('HGET', key('dead:sizes'), task)) or 0))
  call('HDEL', key('dead:sizes'), task)
  call('ZREM', key('dead'), task)
  call('UNLINK', dead_key(task))
end

local function trim_letters(now)
  local old = now - number('dead_ttl_ms', 604800000)
  for _, task in ipairs(call('ZRANGEBYSCORE', key('dead'), '-inf', old, 'LIMIT', 0, 100)) do forget_letter(task) end
  for _ = 1, 1000 do
    if call('ZCARD', key('dead')) <= number('dead_max', 10000)
        and number('dead_bytes', 0) <= number('dead_bytes_max', 67108864) then break end
    forget_letter(call('ZRANGE', key('dead'), 0, 0)[1])
  end
end

local function dead_letter(task, idx, attempt, kind, reason, header)
  count('dead_letters')
  if number('dead_max', 10000) < 1 then return end
  local g, d, now = group_key(task), dead_key(task), now_ms()
  if call('EXISTS', d) == 0 then
    local spec, rules, size, direct, label = unpack(call('HMGET', g, 'spec', 'rules', 'n', 'ch', 'key'))
    local bytes = spec and rules and #spec + #rules or 0
    call('HSET', d, 'n', size, 'ch', direct or '', 'key', label or '')
    if bytes > 0 and bytes <= number('dead_bytes_max', 67108864) then
      call('HSET', d, 'spec', spec, 'rules', rules)
    else
      bytes = 0 -- too large to be kept: shown, but not redriven
    end
    call('PEXPIRE', d, number('dead_ttl_ms', 604800000))
    call('ZADD', key('dead'), now, task)
    call('HSET', key('dead:sizes'), task, bytes)
    call('HINCRBY', STATE, 'dead_bytes', bytes)
  end
  call('HSET', d, 'k' .. idx, kind, 'r' .. idx, string.sub(reason or '', 1, MAX_DETAIL), 'h' .. idx, header,
    'w' .. idx, call('HGET', g, 'w' .. idx) or '', 'a' .. idx, attempt, 't' .. idx, now)
  trim_letters(now)
end

-- What stays of a group that has ended: its outcome, for an hour. One that does not reach a trainer (`place`: where it
-- ended) enters the drop ledger with its `cause`.
local function bury(task, state, reason, place, cause, detail, child)
  local g = group_key(task)
  if place then note_drop(task, state, place, cause, detail, child) end
  if call('EXISTS', dead_key(task)) == 1 then
    call('HSET', dead_key(task), 'end', state)
    if child then call('HSET', dead_key(task), 'next', child) end
  end
  unlink_rows(task)
  local dump, n, usable = unpack(call('HMGET', g, 'dump', 'n', 'usable'))
  call('UNLINK', g)
  call('HSET', g, 'st', state, 'why', reason, 'dump', dump or '', 'n', n or 0, 'usable', usable or 0)
  call('EXPIRE', g, TOMBSTONE_S)
end

-- The file of an evicted group is to be marked.
local function tell_dump(task)
  if call('HGET', group_key(task), 'dump') ~= '' then call('LPUSH', key('evicted'), task) end
end

-- The file of a dumped group is to be rewritten with the rewards in `summary`, a packed GroupSummary; '': they stay. A
-- DumpRewrite as msgpack writes it, by hand: cmsgpack has but one kind of string, and the summary is packed already.
local function tell_rewards(task, summary)
  local folder = call('HGET', group_key(task), 'dump')
  if summary == '' or not folder or folder == '' then return end
  call('RPUSH', key('rewrites'), '\131\164task' .. cmsgpack.pack(tonumber(task)) .. '\166folder' .. cmsgpack.pack(folder)
    .. '\167summary' .. summary)
end

-- Prompts that wait are counted by channel: one that waits for a result must not wait for the other's queue.
local function queued_bytes(direct) return direct == '' and 'queued_bytes' or 'queued_bytes:direct' end

local function put_in_queue(spec, rules, size, direct, ...)
  local task = call('HINCRBY', STATE, 'task_seq', 1)
  call('HSET', group_key(task), 'st', 'queued', 'n', size, 'spec', spec, 'rules', rules, 'ch', direct, 'at', now_ms(),
    'p', task % number('P', 1), ...)
  call('XADD', key(direct == '' and 'prompts' or 'prompts:direct'), '*', 't', task)
  call('HINCRBY', STATE, queued_bytes(direct), #spec + #rules)
  wake('admission')
  return task
end

-- The prompt of a group that is being evicted comes again, under a new id that names its parent. Returns that id.
local function requeue(task)
  local spec, rules, size, times, label = unpack(call('HMGET', group_key(task), 'spec', 'rules', 'n', 'requeues', 'key'))
  times = tonumber(times) or 0
  if times >= number('max_requeues', 0) or not spec then return end
  local child = put_in_queue(spec, rules, size, '', 'parent', task, 'requeues', times + 1, 'key', label or '')
  count('requeued')
  return child
end

-- `place`: the gate at which it is found stale.
local function evict(task, version, place)
  local head = call('HGET', group_key(task), 'head')
  local detail = 'head version ' .. head .. ', training at version ' .. version
  local child
  call('ZREM', key('ready'), task)
  call('HDEL', key('cut'), task)
  if call('HGET', group_key(task), 'ch') == '' then child = requeue(task) end
  bury(task, 'evicted', 'stale: ' .. detail, place, 'stale', detail, child)
  count('evicted')
  tell_dump(task)
  wake('admission')
end

-- Groups that stand between a batch that is cut now and the trainer: an unread batch counts whole, however few groups
-- it holds, since the trainer steps once for each.
local function cut_ahead() return number('cut_batches', 0) * number('B', 1) end

local function capacity() return (number('s', 0) + 1) * number('k', 1) * number('B', 1) end

-- The version at which a group will be trained on when `before` groups are handed over ahead of it (contract 6).
local function version_at_training(before)
  local per_version = number('k', 1) * number('B', 1)
  return number('version', 0) + math.floor((number('ahead', 0) + before) / per_version)
end

local function stale_at(task, version)
  local head = tonumber(call('HGET', group_key(task), 'head'))
  return head ~= nil and head >= 0 and version - head > number('s', 0)
end
