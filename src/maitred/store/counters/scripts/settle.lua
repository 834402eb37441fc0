-- Ends leases and charges what was used: {{lease, {counter -> used}}, ...}. Returns {'settled', {counter -> charged}}
-- of the budgets. A lease that nobody knows changes nothing, but its id cannot be used any more.
local refusal = barred(false)
if refusal then return refusal end
reclaim(RECLAIMED)

local charged = {}
for _, settlement in ipairs(call.settlements) do
  local lease, amounts = settlement[1], settlement[2]
  local raw = redis.call('GET', lease_key(lease))
  if redis.call('SET', settled_key(lease), '', 'NX', 'PX', milliseconds(SETTLED_KEPT_S)) and raw then
    local expires = redis.call('ZSCORE', ENDS, 'l' .. lease)
    local entries = cmsgpack.unpack(raw)
    fetch(entries)
    for _, entry in ipairs(entries) do
      local name = entry[1]
      local state = load(name, entry[2], entry[4], entry[5])
      local used = amounts[name] or 0
      if not expires then
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
