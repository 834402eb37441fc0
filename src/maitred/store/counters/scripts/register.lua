-- Tells what a gateway held before Redis was away: totals {{counter, charged, ends_s}, ...}, slices
-- {{counter, kind, refill_per_s, ends_s, amount, share, most}, ...} and leases {{id, seconds left, entries}, ...}. What
-- Redis knows already stays; a lease that it does not know is taken whether it fits or not; one without time left is
-- remembered, so that settling it charges. Returns {'registered'}.
local refusal = barred(false)
if refusal then return refusal end

for _, total in ipairs(call.totals) do
  local state = load(total[1], 'budget', nil, total[3])
  if total[2] > state.charged then state.charged = total[2] end
  touch(total[1])
end
for _, slice in ipairs(call.slices) do
  local name = slice[1]
  local state, held = load(name, slice[2], slice[3], slice[4]), own_slice(name)
  local share, most = math.max(held.share or 0, slice[6]), math.max(held.most or 0, slice[7])
  take_slice(name, state, math.max(held.amount, slice[5]), share, most)
end
-- If the gateway is cut off before it renews its slices, it is known to be missing.
redis.call('ZADD', HEARD, 'NX', now, call.gateway)
redis.call('ZADD', ENDS, 'NX', now + call.slice_lease_s, 's' .. call.gateway)
for _, lease in ipairs(call.leases) do
  local id, left_s, entries = lease[1], lease[2], lease[3]
  if redis.call('EXISTS', settled_key(id)) == 0 then
    local held = redis.call('ZSCORE', ENDS, 'l' .. id)
    if left_s > 0 then
      if held then
        take_over(id)
      else
        for _, entry in ipairs(entries) do
          take(load(entry[1], entry[2], entry[4], entry[5]), entry[3])
          touch(entry[1])
        end
        write_lease(id, call.gateway, entries)
      end
      redis.call('ZADD', ENDS, now + left_s, 'l' .. id)
    elseif not held then
      write_lease(id, call.gateway, entries, false, 'NX', 'PX', milliseconds(LATE_S))
    end
  end
end
reclaim(RECLAIMED)
save()
return cmsgpack.pack({'registered'})
