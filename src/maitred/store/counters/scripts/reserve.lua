-- Takes all claims or none. Returns {'granted', output, readings}, {'denied', claim, retry_after_s or -1, readings},
-- {'unknown', budgets} or {'used'} when there was a lease of that id before.
local refusal = barred(true)
if refusal then return refusal end
if redis.call('EXISTS', settled_key(call.lease), lease_key(call.lease)) > 0 then return cmsgpack.pack({'used'}) end

local more = reclaim(RECLAIMED)
local unknown = prepare(call.claims)
if #unknown > 0 then
  save()
  return cmsgpack.pack({'unknown', unknown})
end

local NEVER, WAIT, NOBODY_KNOWS = 3, 2, 1

-- How sure it is that this claim has no room, and when it has.
local function outlook(claim, amount)
  local state = states[claim[1]]
  if amount > claim[3] then return NEVER, -1 end
  if state.kind == 'bucket' then
    if state.refill <= 0 then return NEVER, -1 end
    if amount > claim[3] - state.held + own_slice(claim[1]).amount then return NOBODY_KNOWS, -1 end
    return WAIT, (amount - room(claim)) / state.refill
  elseif state.kind == 'budget' and state.charged + amount > claim[3] then
    if claim[8] <= 0 then return NEVER, -1 end
    return WAIT, math.max(0, claim[8] - now)
  end
  return NOBODY_KNOWS, -1
end

local function fit()
  local output, worst, worst_s, denied = call.output, 0, -1, nil
  for i, claim in ipairs(call.claims) do
    local free, asked = math.floor(room(claim)), claim[11]
    if claim[9] and asked > 0 and asked > free then
      local fits = false
      if claim[10] and claim[5] > 0 then
        local most = math.floor((math.max(free, 0) * claim[6] - claim[4]) / claim[5])
        if most >= call.least_output then
          fits = true
          output = math.min(output, most)
        end
      end
      if not fits then
        local rank, wait_s = outlook(claim, claim[10] and claim[12] or asked)
        if rank > worst or (rank == worst and wait_s > worst_s) then
          worst, worst_s, denied = rank, wait_s, i
        end
      end
    end
  end
  return denied, output, worst_s
end

local denied, output, wait_s = fit()
if denied and more then
  reclaim(10 * RECLAIMED)
  denied, output, wait_s = fit()
end
if denied then
  local answer = cmsgpack.pack({'denied', denied - 1, wait_s, readings(call.claims)})
  save()
  return answer
end

local entries = {}
for i, claim in ipairs(call.claims) do
  local name, amount = claim[1], claim[11]
  local state = states[name]
  if output < call.output then amount = math.ceil((claim[4] + claim[5] * output) / claim[6]) end
  take(state, amount)
  touch(name)
  -- What does not fit beside the caller's slice comes out of it.
  local over, slice = math.ceil(taken(state) + state.held - claim[3]), own_slice(name).amount
  if over > 0 and slice > 0 then lower_slice(name, state, math.max(0, slice - over)) end
  entries[i] = {name, claim[2], amount, claim[7], claim[8]}
end
write_lease(call.lease, call.gateway, entries)
redis.call('ZADD', ENDS, now + call.lease_s, 'l' .. call.lease)
local answer = cmsgpack.pack({'granted', output, readings(call.claims)})
save()
return answer
