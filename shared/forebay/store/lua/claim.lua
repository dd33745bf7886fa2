-- Gives a worker jobs that are due, in one step for many. ARGV: most, claim ms. Returns job ids.
-- arq's own claim takes three round trips for each job and looks only at the head of the queue, which ids of running
-- jobs clog; here ids leave the queue when their attempt begins, and a claim whose worker died before that ends by itself.
local most, queue = tonumber(ARGV[1]), key('jobs')
local now, at, claimed = now_ms(), 0, {}
while #claimed < most do
  local ids = call('ZRANGEBYSCORE', queue, '-inf', now, 'LIMIT', at, 100)
  if #ids == 0 then break end
  for _, id in ipairs(ids) do
    if #claimed < most and call('SET', 'arq:in-progress:' .. id, '1', 'PX', ARGV[2], 'NX') then
      claimed[#claimed + 1] = id
    end
  end
  at = at + #ids
end
return claimed
