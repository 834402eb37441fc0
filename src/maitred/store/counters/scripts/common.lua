-- What all scripts share; each of them is appended to this text.
--
-- KEYS[1] is the prefix of every key, with a hash tag, so that a cluster keeps them together. ARGV[1] is the call and
-- the reply its answer, both MessagePack, which keeps whole numbers below 2^53 exact. Time is Redis' own: one clock
-- for all gateways.
--
--   <prefix>:epoch           {id, opens_s}: what Redis holds is one history since this was written
--   <prefix>:counter:<name>  the state of one counter
--   <prefix>:lease:<id>      {gateway, {{counter, kind, amount, refill_per_s, ends_s}, ...}, missing}
--   <prefix>:settled:<id>    this lease has ended; a call that arrives late must not begin it again
--   <prefix>:slices:<gateway>  counter -> {amount, since_s, share, most}: what this gateway holds of it in advance
--   <prefix>:heard           sorted set of gateways by the time at which they renewed their slices last; below 0: a
--                            gateway is missing, because its slices expired then
--   <prefix>:ends            sorted set of 'l' .. lease and 's' .. gateway by the time at which they expire
--
-- A gateway that is not heard may be dead, or it may be cut off and still spend what it holds. Nobody can tell, so all
-- that it holds stays taken until its slices expire, by when it spends nothing of them any more. What it may have spent
-- of budgets until then is not known: that stays taken for `absence_s` longer, unless the gateway comes back and tells.

local prefix = KEYS[1]
local call = cmsgpack.unpack(ARGV[1])
local clock = redis.call('TIME')
local now = tonumber(clock[1]) + tonumber(clock[2]) / 1000000 + call.offset_s

-- When it was sent, at the latest: what the caller did then is told. TCP delivers calls of before a cut after it.
local sent = math.min(now, call.sent_s or now)

local BUDGET_KEPT_S = 3 * 86400   -- after its window
local BUCKET_KEPT_S = 600         -- after it is full
local BUCKET_AT_MOST_S = 30 * 86400
local LATE_S = 86400              -- an expired lease can still be settled
local SETTLED_KEPT_S = 900
local RECLAIMED = 100             -- expired leases that one call frees
local SILENT_S = 3                -- who was not heard for longer may be cut off

local ENDS, HEARD = prefix .. ':ends', prefix .. ':heard'

if now - sent > SILENT_S then call.told = false end

local function counter_key(name) return prefix .. ':counter:' .. name end
local function lease_key(lease) return prefix .. ':lease:' .. lease end
local function settled_key(lease) return prefix .. ':settled:' .. lease end
local function slices_key(gateway) return prefix .. ':slices:' .. gateway end
local function milliseconds(seconds) return string.format('%.0f', math.max(1, math.ceil(seconds * 1000))) end

-- Why this call must not go on: 'lost' when Redis has another history than the caller knows, 'opening' when gateways
-- may still be telling what they hold. nil: it may.
local function barred(takes)
  local raw = redis.call('GET', prefix .. ':epoch')
  if not raw then return cmsgpack.pack({'lost'}) end
  local epoch = cmsgpack.unpack(raw)
  if epoch[1] ~= call.epoch then return cmsgpack.pack({'lost'}) end
  if takes and now < epoch[2] then return cmsgpack.pack({'opening'}) end
  return nil
end

-- --- counters ------------------------------------------------------------------------------------------------------

local states, changed = {}, {}

-- A state as Redis keeps it, by kind; all begin with the kind and what slices hold.
local function packed(state)
  if state.kind == 'bucket' then
    return cmsgpack.pack({'bucket', state.held, state.missing, state.at, state.refill, state.withheld, state.full_at,
                         state.owed})
  elseif state.kind == 'pool' then
    return cmsgpack.pack({'pool', state.held, state.reserved})
  end
  return cmsgpack.pack({'budget', state.held, state.charged, state.reserved, state.seeded, state.ends})
end

local function unpacked(raw)
  local kept = cmsgpack.unpack(raw)
  local kind, held = kept[1], kept[2]
  if kind == 'bucket' then
    return {kind = kind, held = held, missing = kept[3], at = kept[4], refill = kept[5],
            withheld = kept[6] or 0, full_at = kept[7] or kept[4], owed = kept[8] or 0}
  elseif kind == 'pool' then
    return {kind = kind, held = held, charged = 0, reserved = kept[3]}
  end
  return {kind = kind, held = held, charged = kept[3], reserved = kept[4], seeded = kept[5], ends = kept[6]}
end

-- Reads the states of many counters at once; rows have the name first.
local function fetch(rows)
  local names, keys = {}, {}
  for _, row in ipairs(rows) do
    if not states[row[1]] then
      names[#names + 1] = row[1]
      keys[#keys + 1] = counter_key(row[1])
    end
  end
  if #keys == 0 then return end
  for i, raw in ipairs(redis.call('MGET', unpack(keys))) do
    if raw then states[names[i]] = unpacked(raw) end
  end
end

-- The state of a counter, as this call has left it so far; with a kind, one that does not exist yet begins empty.
local function load(name, kind, refill, ends)
  local state = states[name]
  if not state then
    local raw = redis.call('GET', counter_key(name))
    if raw then state = unpacked(raw) end
  end
  if kind and (not state or state.kind ~= kind) then
    if kind == 'bucket' then
      state = {kind = kind, held = 0, missing = 0, at = now, refill = 0, withheld = 0, full_at = now, owed = 0}
    else
      state = {kind = kind, held = 0, charged = 0, reserved = 0, seeded = false, ends = 0}
    end
  end
  if not state then return nil end
  states[name] = state
  if state.kind == 'bucket' then
    if now > state.at then
      -- The part of the rate that slices may be refilled with meanwhile is not here; see `credit`.
      local refill = (now - state.at) * state.refill * math.max(0, 1 - state.withheld)
      state.missing = math.max(state.owed, state.missing - refill)
      state.at = now
      if state.missing == 0 then state.full_at = now end
    end
    if refill then state.refill = refill end
  elseif ends then
    state.ends = ends
  end
  return state
end

local function touch(name) changed[name] = true end

local function save()
  for name in pairs(changed) do
    local state, key = states[name], counter_key(name)
    local kept_s, idle = nil, false
    if state.kind == 'bucket' then
      idle = state.missing <= 0 and state.held <= 0 and state.withheld <= 0
      kept_s = BUCKET_AT_MOST_S
      if state.refill > 0 and state.withheld <= 0 then kept_s = math.min(kept_s, state.missing / state.refill + BUCKET_KEPT_S) end
    elseif state.kind == 'pool' then
      idle = state.reserved <= 0 and state.held <= 0
    elseif state.ends > 0 then
      kept_s = math.max(0, state.ends - now) + BUDGET_KEPT_S
    end
    if idle then
      redis.call('DEL', key)
    elseif kept_s then
      redis.call('SET', key, packed(state), 'PX', milliseconds(kept_s))
    else
      redis.call('SET', key, packed(state))
    end
  end
end

local function taken(state)
  if state.kind == 'bucket' then return state.missing end
  return state.charged + state.reserved
end

local function take(state, amount)
  if state.kind == 'bucket' then state.missing = state.missing + amount else state.reserved = state.reserved + amount end
end

local function give_back(state, amount)
  if state.kind == 'bucket' then
    state.missing = math.max(state.owed, state.missing - amount)
  else
    state.reserved = math.max(0, state.reserved - amount)
  end
end

local function charge(state, amount)
  if state.kind == 'bucket' then
    state.missing = math.max(state.owed, state.missing + amount)
  elseif state.kind == 'budget' then
    state.charged = state.charged + amount
  end
end

-- --- slices --------------------------------------------------------------------------------------------------------

local own = {}
local NOTHING = {amount = 0}

local function unpacked_slice(raw)
  if not raw then return NOTHING end
  if string.find(raw, '^%d+$') then return {amount = tonumber(raw), since = now, share = 0} end  -- of an earlier release
  local kept = cmsgpack.unpack(raw)
  return {amount = kept[1], since = kept[2], share = kept[3], most = kept[4] or 0}
end

local function packed_slice(slice) return cmsgpack.pack({slice.amount, slice.since, slice.share, slice.most}) end

-- What the refill may still add to a slice of a rate. As long as it may, that much is missing for the others.
local function owed(slice) return math.max(0, (slice.most or 0) - slice.amount) end

local function write_slice(name, slice)
  own[name] = slice
  redis.call('HSET', slices_key(call.gateway), name, packed_slice(slice))
end

-- Reads what the caller holds of many counters at once; rows have the name first.
local function fetch_slices(rows)
  if #rows == 0 then return end
  local names = {}
  for i, row in ipairs(rows) do names[i] = row[1] end
  for i, raw in ipairs(redis.call('HMGET', slices_key(call.gateway), unpack(names))) do
    own[names[i]] = unpacked_slice(raw)
  end
end

-- What the caller holds of a counter in advance: room for the caller, and for nobody else.
local function own_slice(name)
  if not own[name] then fetch_slices({{name}}) end
  return own[name]
end

-- What the caller's slice of a rate could have been refilled with since the caller was heard. The caller has not used
-- it, or has told what it used: so it is room for the caller.
local function credit(name, state)
  local slice = own_slice(name)
  if state.kind ~= 'bucket' or not call.told or not slice.since then return 0 end
  return math.max(0, sent - math.max(slice.since, state.full_at)) * state.refill * slice.share
end

-- Gives the refill that slices withheld until now back to a rate.
local function refill_withheld(name, state)
  if state.kind ~= 'bucket' then return end
  state.missing = math.max(0, state.owed - owed(own_slice(name)), state.missing - credit(name, state))
  if state.missing == 0 then state.full_at = now end
end

local function release_slice(state, slice)
  state.held = math.max(0, state.held - slice.amount)
  if state.kind == 'bucket' then
    state.withheld = state.withheld - slice.share
    if state.withheld < 1e-9 then state.withheld = 0 end
    state.owed = math.max(0, state.owed - owed(slice))
  end
end

-- Lowers the amount of a slice to what is left of it.
local function shrink(state, slice, amount)
  local before = owed(slice)
  state.held = math.max(0, state.held + amount - slice.amount)
  slice.amount = amount
  if state.kind == 'bucket' then state.owed = state.owed + owed(slice) - before end
end

-- Lowers what the caller holds to what a reservation leaves of it.
local function lower_slice(name, state, amount)
  local slice = own_slice(name)
  shrink(state, slice, amount)
  write_slice(name, slice)
  touch(name)
end

local function drop_slice(name)
  local state, slice = load(name), own_slice(name)
  if state and slice.since then
    refill_withheld(name, state)
    release_slice(state, slice)
    touch(name)
  end
  own[name] = NOTHING
  redis.call('HDEL', slices_key(call.gateway), name)
end

-- The part of a rate at which the caller's slice may be refilled: what other slices leave of it, at most `share`.
local function free_share(name, state, share)
  if state.kind ~= 'bucket' then return share end
  return math.max(0, math.min(share, 1 - (state.withheld - (own_slice(name).share or 0))))
end

-- `most`: what the slice of a rate may be refilled to.
local function take_slice(name, state, amount, share, most)
  local slice = own_slice(name)
  refill_withheld(name, state)
  if slice.since then release_slice(state, slice) end
  state.held = state.held + amount
  local taken_slice = {amount = amount, since = sent, share = share, most = most}
  if state.kind == 'bucket' then
    state.withheld = state.withheld + share
    state.owed = state.owed + owed(taken_slice)
    state.missing = math.max(state.missing, state.owed)
  end
  write_slice(name, taken_slice)
  touch(name)
end

-- Ends the slices of a gateway; `missing`: those of budgets stay taken, because it may have spent them.
local function release_slices(gateway, missing)
  local slices = redis.call('HGETALL', slices_key(gateway))
  for i = 1, #slices, 2 do
    local name, slice = slices[i], unpacked_slice(slices[i + 1])
    local state = load(name)
    if state and call.told and gateway == call.gateway then refill_withheld(name, state) end
    if not (state and missing and state.kind == 'budget') then
      if state then
        release_slice(state, slice)
        -- What it may have taken of a rate comes back as everything does there: with time.
        if missing and state.kind == 'bucket' then state.missing = state.missing + slice.amount end
        touch(name)
      end
      redis.call('HDEL', slices_key(gateway), name)
      if gateway == call.gateway then own[name] = NOTHING end
    end
  end
  if missing then
    redis.call('ZADD', HEARD, -now, gateway)
    redis.call('ZADD', ENDS, now + call.absence_s, 's' .. gateway)
  else
    redis.call('DEL', slices_key(gateway))
    redis.call('ZREM', HEARD, gateway)
    redis.call('ZREM', ENDS, 's' .. gateway)
  end
end

-- --- leases --------------------------------------------------------------------------------------------------------

local function write_lease(id, gateway, entries, missing, ...)
  redis.call('SET', lease_key(id), cmsgpack.pack({gateway, entries, missing or false}), ...)
end

-- The gateway of a lease, its entries, and whether only its budgets are still taken; nil when nobody knows it.
local function read_lease(id)
  local raw = redis.call('GET', lease_key(id))
  if not raw then return nil end
  local kept = cmsgpack.unpack(raw)
  if type(kept[1]) ~= 'string' then return '', kept, false end  -- of an earlier release
  return kept[1], kept[2], kept[3]
end

local function free_entries(entries, only_pools)
  fetch(entries)
  for _, entry in ipairs(entries) do
    if not only_pools or entry[2] == 'pool' then
      give_back(load(entry[1], entry[2], entry[4], entry[5]), entry[3])
      touch(entry[1])
    end
  end
end

-- Takes again what was given back when the gateway of a lease was missed; the caller has the lease now.
local function revive(id, entries)
  for _, entry in ipairs(entries) do
    if entry[2] == 'pool' then
      take(load(entry[1], entry[2], entry[4], entry[5]), entry[3])
      touch(entry[1])
    end
  end
  write_lease(id, call.gateway, entries)
end

-- The caller has a lease from now on, whoever had it before.
local function take_over(id)
  local gateway, entries, missing = read_lease(id)
  if missing then
    revive(id, entries)
  elseif gateway ~= call.gateway then
    write_lease(id, call.gateway, entries)
  end
end

-- A lease has expired: it is freed, unless its gateway may be cut off and still spend it.
local function end_lease(id)
  local gateway, entries, missing = read_lease(id)
  if not gateway then redis.call('ZREM', ENDS, 'l' .. id) return end
  local score = not missing and not (call.told and gateway == call.gateway) and redis.call('ZSCORE', HEARD, gateway)
  local heard = score and tonumber(score)
  if heard and heard >= 0 and now - heard > SILENT_S then
    local ends = redis.call('ZSCORE', ENDS, 's' .. gateway)
    if ends and tonumber(ends) > now then
      redis.call('ZADD', ENDS, ends, 'l' .. id)
      return
    end
  end
  if heard and (heard < 0 or now - heard > SILENT_S) then
    free_entries(entries, true)
    write_lease(id, gateway, entries, true)
    redis.call('ZADD', ENDS, now + call.absence_s, 'l' .. id)
    return
  end
  if missing then
    for _, entry in ipairs(entries) do
      if entry[2] == 'budget' then free_entries({entry}) end
    end
  else
    free_entries(entries)
  end
  redis.call('PEXPIRE', lease_key(id), milliseconds(LATE_S))
  redis.call('ZREM', ENDS, 'l' .. id)
end

-- Frees what has expired, oldest first; true when there may be more.
local function reclaim(most)
  local ended = redis.call('ZRANGEBYSCORE', ENDS, '-inf', now, 'LIMIT', 0, most)
  for _, member in ipairs(ended) do
    local id = string.sub(member, 2)
    if string.sub(member, 1, 1) == 'l' then
      end_lease(id)
    else
      local heard = tonumber(redis.call('ZSCORE', HEARD, id) or '-1')
      release_slices(id, heard >= 0 and not (call.told and id == call.gateway))
    end
  end
  return #ended == most
end

-- --- claims --------------------------------------------------------------------------------------------------------

-- Loads the counters of claims, and sees that no budget goes backwards: it is at least what the caller saw of it last,
-- and what the database says when it is met for the first time. Returns the budgets that the database must be asked
-- about. A claim: {counter, kind, capacity, fixed, per_output, divisor, refill_per_s, ends_s, hard, clamps, asked,
-- least, known, spent}; asked and least are amounts, -1 stands for nothing known.
local function prepare(claims)
  local unknown = {}
  fetch(claims)
  fetch_slices(claims)
  for _, claim in ipairs(claims) do
    local name = claim[1]
    local state = load(name, claim[2], claim[7], claim[8])
    if state.kind == 'budget' then
      if claim[13] > state.charged then state.charged = claim[13]; touch(name) end
      if not state.seeded then
        if claim[14] >= 0 then
          state.charged = math.max(state.charged, claim[14])
          state.seeded = true
          touch(name)
        else
          unknown[#unknown + 1] = name
        end
      end
    end
  end
  return unknown
end

-- What the caller could take now.
local function room(claim)
  local state = states[claim[1]]
  local used = taken(state)
  if state.kind == 'bucket' then
    used = math.max(0, state.owed - owed(own_slice(claim[1])), used - credit(claim[1], state))
  end
  return claim[3] - used - state.held + own_slice(claim[1]).amount
end

-- {remaining, reset_s, used, reserved, slice} of each claim.
local function readings(claims)
  local out = {}
  for i, claim in ipairs(claims) do
    local state = states[claim[1]]
    local remaining, reset_s, used, reserved = math.floor(room(claim)), 0, 0, 0
    if state.kind == 'bucket' then
      used = claim[3] - remaining
      if state.refill > 0 then reset_s = state.missing / state.refill end
    elseif state.kind == 'pool' then
      used = state.reserved
    else
      used, reserved = state.charged, state.reserved
      if claim[8] > 0 then reset_s = math.max(0, claim[8] - now) end
    end
    out[i] = {remaining, reset_s, used, reserved, own_slice(claim[1]).amount}
  end
  return out
end
