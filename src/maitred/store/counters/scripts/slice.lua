-- Renews the caller's slices: of each claim as much as `share` says, as far as there is room, and nothing of what it
-- wants no more. Returns {'sliced', readings}.
local refusal = barred(true)
if refusal then return refusal end
reclaim(RECLAIMED)

for _, name in ipairs(call.unwanted) do
  local state = load(name)
  if state then set_slice(name, state, 0) else redis.call('HDEL', slices_key(call.gateway), name) end
end
local unknown = {}
for _, name in ipairs(prepare(call.claims)) do unknown[name] = true end
for _, claim in ipairs(call.claims) do
  local name = claim[1]
  local free = math.max(0, math.floor(room(claim)))
  -- Of a budget a share of what remains: so the slices become nothing as it runs out.
  local wanted = math.floor(call.share * (claim[2] == 'budget' and free or claim[3]))
  if unknown[name] then wanted = 0 end
  wanted = math.min(wanted, free)
  if wanted ~= own_slice(name) then set_slice(name, states[name], wanted) end
end
redis.call('ZADD', ENDS, now + call.slice_lease_s, 's' .. call.gateway)
local answer = cmsgpack.pack({'sliced', readings(call.claims)})
save()
return answer
