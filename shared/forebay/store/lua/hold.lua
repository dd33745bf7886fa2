-- A collector says that it lives, renews the partitions that it owns, and takes free ones up to its share. uses _partitions
-- ARGV: collector, lease ms. Returns {{partition, epoch, 1 to keep it or 0: it is more than its share}, ...}.
-- Shares differ by one at most, and whoever has more keeps the one more, so that as few partitions as can be move.
local me, lease, now = ARGV[1], ARGV[2], now_ms()
call('ZADD', COLLECTORS, now, me)
call('ZREMRANGEBYSCORE', COLLECTORS, '-inf', now - 10 * tonumber(lease))
local partitions, owner, held = needed(), {}, {}
for _, p in ipairs(partitions) do
  owner[p] = call('GET', partition_lease(p))
  if owner[p] then held[owner[p]] = (held[owner[p]] or 0) + 1 end
end

local function share()
  local all = live(now)
  table.sort(all, function(a, b)
    local has_a, has_b = held[a] or 0, held[b] or 0
    if has_a ~= has_b then return has_a > has_b end
    return a < b
  end)
  local least, more = math.floor(#partitions / #all), #partitions % #all
  for rank, name in ipairs(all) do
    if name == me then return least + (rank <= more and 1 or 0) end
  end
  return 0
end

local function take(p)
  call('SET', partition_lease(p), me, 'PX', lease)
  if call('HGET', PARTITIONS, 'owner:' .. p) ~= me then
    call('HSET', PARTITIONS, 'owner:' .. p, me)
    call('HINCRBY', PARTITIONS, 'epoch:' .. p, 1)
  end
  return tonumber(call('HGET', PARTITIONS, 'epoch:' .. p))
end

local left, out = share(), {}
local function look(wanted)
  for _, p in ipairs(partitions) do
    if wanted(p) then
      local within = left > 0
      if owner[p] or within then
        out[#out + 1] = {p, take(p), within and 1 or 0}
        owner[p] = me
        left = left - 1
      end
    end
  end
end
look(function(p) return owner[p] == me end)
-- First those that it had before: after an absence of Redis all leases have ended, and nobody need move.
look(function(p) return not owner[p] and call('HGET', PARTITIONS, 'owner:' .. p) == me end)
look(function(p) return not owner[p] end)
return out
