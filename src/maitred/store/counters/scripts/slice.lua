-- Renews the caller's slices: of each claim as much as its place in `shares` says, as far as there is room, and nothing of what it
-- wants no more. Returns {'sliced', readings, wanted, shares, now}; the shares are the parts of the rates at which the slices
-- may be refilled.
--
-- The reply may be lost, and the caller then goes on with what it had. So a slice is never less here than the caller
-- says that it holds (`holding`, in the order of the claims): it takes `wanted`, and says so next time.
local refusal = barred(true)
if refusal then return refusal end
reclaim(RECLAIMED)

for _, name in ipairs(call.unwanted) do drop_slice(name) end
local unknown = {}
for _, name in ipairs(prepare(call.claims)) do unknown[name] = true end
local all_wanted, shares = {}, {}
for i, claim in ipairs(call.claims) do
  local name = claim[1]
  local state = states[name]
  local free = math.max(0, math.floor(room(claim)))
  -- Of a budget a share of what remains: so the slices become nothing as it runs out.
  local wanted = math.floor(call.shares[i] * (claim[2] == 'budget' and free or claim[3]))
  if unknown[name] then wanted = 0 end
  wanted = math.min(wanted, free)
  all_wanted[i], shares[i] = wanted, free_share(name, state, call.shares[i])
  local most = state.kind == 'bucket' and claim[3] * shares[i] or 0
  take_slice(name, state, math.max(wanted, math.min(own_slice(name).amount, call.holding[i])), shares[i], most)
end
redis.call('ZADD', ENDS, sent + call.slice_lease_s, 's' .. call.gateway)
redis.call('ZADD', HEARD, sent, call.gateway)
local answer = cmsgpack.pack({'sliced', readings(call.claims), all_wanted, shares, now})
save()
return answer
