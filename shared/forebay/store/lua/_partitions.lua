-- Prepended to the scripts that say `uses _partitions`: who owns which partition of the slot results. The hash
-- `partitions` has for each `epoch:P`, its fencing epoch, and `owner:P`, who held its lease last.
local PARTITIONS, COLLECTORS = key('partitions'), key('collectors')

local function partition_lease(p) return key('lease:results:' .. p) end

-- Whoever lost the lease of a partition carries an old epoch and may change nothing in it.
local function partition_fenced(p, epoch) return call('HGET', PARTITIONS, 'epoch:' .. p) ~= epoch end

-- The partitions that need an owner: those that groups are put in, and older ones as long as they hold entries.
local function needed()
  local used, out = number('P', 1), {}
  for p = 0, math.max(used, number('P_max', 1)) - 1 do
    if p < used or call('XLEN', key('results:' .. p)) > 0 then out[#out + 1] = p end
  end
  return out
end

-- Gives a lease up, and fences its owner at once: what it has still under way changes nothing.
local function let_go(p, owner)
  if call('GET', partition_lease(p)) ~= owner then return 0 end
  call('DEL', partition_lease(p))
  call('HDEL', PARTITIONS, 'owner:' .. p)
  call('HINCRBY', PARTITIONS, 'epoch:' .. p, 1)
  return 1
end

-- The collectors that have beaten within a lease.
local function live(now)
  return call('ZRANGEBYSCORE', COLLECTORS, '(' .. now - number('collector_lease_ms', 5000), '+inf')
end
