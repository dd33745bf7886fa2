-- Prepended to the scripts that say `uses _bounds`: the bounds on what waits and on what is kept, 0 being none
-- (docs/operations.md, Bounds). A bound stops what is new; what runs goes on, for it is what frees.

-- The answer to whoever would put another prompt in the queue, where that is full. One prompt may always wait.
local function queue_full(direct, bytes)
  local queued = call('XLEN', key(direct == '' and 'prompts' or 'prompts:direct'))
  local most = number('max_queued', 10000)
  if queued >= most then return {'full', tostring(queued), tostring(most)} end
  local waiting, most_bytes = number(queued_bytes(direct), 0), number('max_queued_bytes', 0)
  if most_bytes > 0 and queued > 0 and waiting + bytes > most_bytes then
    return {'full_bytes', tostring(queued), waiting, bytes, most_bytes}
  end
end

-- Results that the collectors have yet to commit.
local function unread_results()
  local entries = 0
  for p = 0, math.max(number('P', 1), number('P_max', 1)) - 1 do entries = entries + call('XLEN', key('results:' .. p)) end
  return entries
end

local function results_full()
  local most = number('max_unread', 0)
  return most > 0 and unread_results() >= most
end

-- What a usable slot is taken to bring, in bytes: the largest of late, slowly forgotten; a guess before the first.
local FIRST_SLOT_BYTES = 65536
local FORGET = 1 / 64

local function slot_bytes() return number('slot_bytes', FIRST_SLOT_BYTES) end

local function note_slot_bytes(bytes)
  local last = number('slot_bytes', 0)
  call('HSET', STATE, 'slot_bytes', math.floor(math.max(bytes, last + (bytes - last) * FORGET)))
end

-- Bytes of rows that are kept, and those that the slots which run will bring. Every open slot is queued or leased.
local function expected_rows()
  return number('rows_bytes', 0) + (call('ZCARD', key('leases')) + call('ZCARD', key('jobs'))) * slot_bytes()
end
