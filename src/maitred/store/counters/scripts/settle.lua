-- Ends leases and charges what was used: {{lease, {counter -> used}}, ...}. Returns {'settled', {counter -> charged}}
-- of the budgets. A lease that nobody knows changes nothing, but its id cannot be used any more. With a third word, a
-- gateway that has died, what was used of such a lease comes out of the slices of that gateway: it was cut off when it
-- gave the lease, or the settlement is here a second time, long after the first.
local refusal = barred(false)
if refusal then return refusal end
reclaim(RECLAIMED)

local charged = {}

local function charge_slices(gateway, amounts)
  for name, used in pairs(amounts) do
    local raw, state = redis.call('HGET', slices_key(gateway), name), load(name)
    if raw and state and state.kind ~= 'pool' then
      local slice = unpacked_slice(raw)
      local spent = math.min(used, slice.amount)
      shrink(state, slice, slice.amount - spent)
      redis.call('HSET', slices_key(gateway), name, packed_slice(slice))
      charge(state, spent)
      touch(name)
    end
  end
end

for _, settlement in ipairs(call.settlements) do
  local lease, amounts = settlement[1], settlement[2]
  local gateway, entries, missing = read_lease(lease)
  local first = redis.call('SET', settled_key(lease), '', 'NX', 'PX', milliseconds(SETTLED_KEPT_S))
  if first and not gateway and settlement[3] then charge_slices(settlement[3], amounts) end
  if first and gateway then
    local expires = redis.call('ZSCORE', ENDS, 'l' .. lease)
    fetch(entries)
    for _, entry in ipairs(entries) do
      local name = entry[1]
      local state = load(name, entry[2], entry[4], entry[5])
      local used = amounts[name] or 0
      if not expires or (missing and state.kind == 'pool') then
        charge(state, used)
      elseif state.kind == 'bucket' then
        charge(state, used - entry[3])
      else
        give_back(state, entry[3])
        charge(state, used)
      end
      touch(name)
      if state.kind == 'budget' then charged[name] = state.charged end
    end
    redis.call('DEL', lease_key(lease))
    redis.call('ZREM', ENDS, 'l' .. lease)
  end
end
save()
return cmsgpack.pack({'settled', charged})
