-- What the next batch may wait for, in one look: the oldest running groups with their open slots, the last cut, what was
-- dropped since, who submits and who reads. Changes nothing, but that the time of a leading collector's look is kept.
-- ARGV: 1 for the leading collector, most groups, most open slots of a group. Returns a map in msgpack; times are ms ago,
-- negative ones ahead.
local most_groups, most_slots = tonumber(ARGV[2]), tonumber(ARGV[3])
local now = now_ms()
-- pcall: a Redis that is out of memory must still say so.
if ARGV[1] == '1' then redis.pcall('HSET', STATE, 'watched_at', now) end

local GROUPS_SEEN, SLOTS_SEEN, DROPS_SEEN, READERS_SEEN = 600, 512, 500, 64

local function ago(at) return tonumber(at) and now - tonumber(at) or nil end

local function open_slot(task, idx, fields)
  local _, attempt, worker, claimed, failure = unpack(fields)
  local lease = call('ZSCORE', key('leases'), member(task, idx, attempt))
  local due = call('ZSCORE', key('jobs'), job_id(task, idx, attempt))
  return {idx = idx, attempt = tonumber(attempt), failure = failure or nil, worker = lease and worker or nil,
          leased = lease and ago(claimed) or nil, due = due and ago(due) or nil}
end

local function group_of(task, size, run_at, deadline, channel)
  local g, slots, open = group_key(task), {}, 0
  for idx = 0, math.min(size, SLOTS_SEEN) - 1 do
    local fields = call('HMGET', g, 'd' .. idx, 'a' .. idx, 'w' .. idx, 'c' .. idx, 'x' .. idx)
    if not fields[1] and fields[2] then
      open = open + 1
      if #slots < most_slots then slots[#slots + 1] = open_slot(task, idx, fields) end
    end
  end
  return {task = tonumber(task), size = size, open = open, age = ago(run_at), deadline = ago(deadline), channel = channel,
          slots = slots}
end

-- The oldest groups of the batches; where none runs, of those that are asked for by their id.
local function oldest()
  local groups, direct = {}, {}
  for _, task in ipairs(call('ZRANGE', key('deadlines'), 0, GROUPS_SEEN - 1)) do
    local state, channel, size, run_at, deadline = unpack(call('HMGET', group_key(task), 'st', 'ch', 'n', 'run_at', 'dl'))
    local list = channel == '' and groups or direct
    if state == 'running' and #list < most_groups then
      list[#list + 1] = group_of(task, tonumber(size) or 0, run_at, deadline, channel)
    end
    if #groups >= most_groups then break end
  end
  return #groups > 0 and groups or direct
end

-- Groups that were dropped since the last cut: how many of each kind, and what the newest of a kind says.
local function dropped(since)
  local counts, details = {}, {}
  for _, entry in ipairs(call('XREVRANGE', key('drops'), '+', since or '0', 'COUNT', DROPS_SEEN)) do
    local drop = named(entry[2])
    local kind = (drop.o or '?') .. ': ' .. (drop.r or '?')
    counts[kind] = (counts[kind] or 0) + 1
    details[kind] = details[kind] or drop.d or ''
  end
  return counts, details
end

local function last_submit()
  local about = redis.pcall('XINFO', 'STREAM', key('prompts'))
  if about.err then return nil end
  local ms = string.match(named(about)['last-generated-id'] or '', '^(%d+)')
  return ms and tonumber(ms) > 0 and ago(ms) or nil
end

-- How long ago a rank of the driving consumer last asked for a batch.
local function reader_idle(driver)
  local groups, idle, seen = redis.pcall('XINFO', 'GROUPS', key('batches')), nil, 0
  if not driver or groups.err then return nil end
  for _, group in ipairs(groups) do
    local cursor = named(group).name
    if string.match(cursor, '^[^/]+') == driver and seen < READERS_SEEN then
      seen = seen + 1
      for _, consumer in ipairs(call('XINFO', 'CONSUMERS', key('batches'), cursor)) do
        local ms = tonumber(named(consumer).idle)
        if ms and (not idle or ms < idle) then idle = ms end
      end
    end
  end
  return idle
end

local cut_at, watched_at, eod, driver = unpack(call('HMGET', STATE, 'cut_at', 'watched_at', 'eod', 'driver'))
local counts, details = dropped(cut_at)
return cmsgpack.pack({
  groups = oldest(), drops = counts, details = details, since_cut = cut_at and ago(cut_at) or nil,
  watched = watched_at and ago(watched_at) or nil, ended = eod == '1', driver = driver or nil,
  reader_idle = reader_idle(driver), since_submit = last_submit(), due = call('ZCOUNT', key('jobs'), '-inf', now),
  later = call('ZCOUNT', key('jobs'), '(' .. now, '+inf'),
})
