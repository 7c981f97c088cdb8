@0xd1c3a7b5e94f2086;
# Whatever crosses a process boundary in Zipage. Fields are described from the sender's point of view.
# Messages travel unpacked, one per ZeroMQ frame; lists are flat so that a step encodes in microseconds.

using Cxx = import "/capnp/c++.capnp";
$Cxx.namespace("zipage::schema");

# ---------------------------------------------------------------- worker to scheduler

struct WorkerMessage {
  union {
    hello @0 :Hello;
    ready @1 :Ready;
    heartbeat @2 :Heartbeat;
    result @3 :StepResult;
    error @4 :WorkerError;
  }
}

struct Hello {
  # First message of a worker, before it loads anything.
  protocolVersion @0 :UInt32;  # Must equal the scheduler's.
  rank @1 :UInt32;  # Tensor-parallel rank, from 0.
  tp @2 :UInt32;  # Number of ranks the worker was started for.
  epoch @3 :UInt64;  # Life of the set of workers it belongs to, from 1.
  configDigest @4 :UInt64;  # Of every option that changes results or shapes.
  pid @5 :Int64;
  device @6 :Text;  # For people: "cpu, 2 threads".
}

struct Ready {
  # Weights are loaded and memory is measured.
  rank @0 :UInt32;
  numKvBlocks @1 :UInt64;  # Blocks that fit on this rank.
  weightBytes @2 :UInt64;
  kvBlockBytes @3 :UInt64;  # Of one block over all layers: keys, values and stored scores.
  computeDtype @4 :Text;  # "float32" or "bfloat16": what dtype auto became.
  maxPositions @5 :UInt64;  # max_position_embeddings of the model.
  vocabSize @6 :UInt64;  # Rows of the embedding: a token id must be below.
  numQuerySlots @7 :UInt64;  # Query windows that fit beside the blocks; 0 without compression.
  numHostBlocks @8 :UInt64;  # Blocks of swapped sequences that host memory takes.
}

enum WorkerPhase {
  starting @0;
  loadingWeights @1;
  waitingForStart @2;
  idle @3;  # Waiting for a plan.
  running @4;  # Executing the step named beside it.
}

struct Heartbeat {
  # Sent every second by a thread of its own, also while a step runs.
  rank @0 :UInt32;
  phase @1 :WorkerPhase;
  step @2 :UInt64;  # The last step begun; 0 before the first.
}

struct StepResult {
  # Every rank answers every plan, in order; only rank 0 fills more than rank and step.
  rank @0 :UInt32;
  step @1 :UInt64;
  sequenceSlots @2 :List(Int32);  # The sequence slots that got a token, in the order of the plan.
  tokens @3 :List(Int32);  # Their tokens.
  # Log-probabilities, only of slots that asked: per such slot, in the same order, one LogprobRow.
  logprobSlots @4 :List(Int32);
  logprobOffsets @5 :List(UInt32);  # Row i holds entries [offsets[i], offsets[i+1]); the first is the token's own.
  logprobTokens @6 :List(Int32);
  logprobValues @7 :List(Float32);
  corruptedSlots @8 :List(Int32);  # Slots whose logits were not numbers: they have no token.
  finishedCompressions @9 :List(Int32);  # Sequence slots whose compression is done.
  deviceMicros @10 :UInt64;  # Time from the start of the step to its end on the device.
  # Of each finished compression: prompt tokens that its slots still hold, mean over layers and KV heads.
  promptTokensKept @11 :List(Float32);
  compressionMicros @12 :UInt64;  # Time of finished compressions on the device.
}

struct WorkerError {
  # The worker's last word: it exits after sending it.
  rank @0 :UInt32;
  step @1 :UInt64;  # 0 before the first step.
  code @2 :UInt32;  # absl::StatusCode
  message @3 :Text;
}

# ---------------------------------------------------------------- scheduler to worker

struct SchedulerMessage {
  union {
    start @0 :Start;
    plan @1 :StepPlan;
    shutdown @2 :Void;  # Finish what was sent and exit with status 0.
  }
}

struct Start {
  # After every rank is ready: the minimum over ranks of what fits.
  numKvBlocks @0 :UInt64;
  numQuerySlots @1 :UInt64;
}

struct StepPlan {
  # A delta: workers keep each sequence's block table, cached length, last token and sampling state.
  # Applied in this order: releases, swaps to the host, new sequences, query slots, swaps to the device,
  # blocks, compressions, pauses, resumptions; then chunks and decode run together as one batch.
  step @0 :UInt64;  # From 1 in each epoch. A gap or a repeat ends the epoch.
  released @1 :List(Int32);  # Sequence slots whose state is dropped.
  newSequences @2 :List(NewSequence);
  # Blocks added at the end of tables: blockIds[i] goes to the table of blockSlots[i], in order.
  blockSlots @3 :List(Int32);
  blockIds @4 :List(Int32);
  # Chunks of prefill: the next chunkTokens[i] tokens of chunkSlots[i], from position chunkStarts[i],
  # which must equal the worker's own next position. chunkSamples[i]: the chunk is the prompt's last;
  # a token is sampled, and the slot decodes from the next step on until it is released.
  chunkSlots @5 :List(Int32);
  chunkStarts @6 :List(Int32);
  chunkTokens @7 :List(Int32);
  chunkSamples @8 :List(Bool);
  numDecoding @9 :UInt32;  # Slots that decode in this step: the worker's own count must agree.
  compressions @10 :List(Compression);
  swaps @11 :List(Swap);
  paused @12 :List(Int32);  # Sequence slots that sit out from now on: no decode, no chunk.
  resumed @13 :List(Int32);  # Paused sequence slots that run again.
  # querySlots[i] goes to querySlotOwners[i]: from now on its queries are kept there, until the sequence
  # is released or swapped to the host.
  querySlotOwners @14 :List(Int32);
  querySlots @15 :List(Int32);
}

struct NewSequence {
  sequenceSlot @0 :Int32;  # Free until now.
  tokens @1 :List(Int32);  # Prompt, then output so far (after a preemption).
  numPromptTokens @2 :UInt32;
  numCachedTokens @3 :UInt32;  # Positions whose keys and values the first blocks hold already.
  blockTable @4 :List(Int32);  # Blocks of the cached positions, and more.
  sampleIndex @5 :UInt32;  # Which of the request's n samples.
  sampling @6 :SamplingParams;
}

struct SamplingParams {
  # See proto/sampling_params.h.
  temperature @0 :Float32;
  topP @1 :Float32;
  topK @2 :Int32;
  minP @3 :Float32;
  repetitionPenalty @4 :Float32;
  presencePenalty @5 :Float32;
  frequencyPenalty @6 :Float32;
  seed @7 :UInt64;
  maxTokens @8 :Int32;
  minTokens @9 :Int32;
  stopTokenIds @10 :List(Int32);
  numLogprobs @11 :Int32;
}

struct Compression {
  # Keep the best slots of the full blocks of sourceTable, packed into all blocks of targetTable but the
  # last, which is empty: it becomes the block table at once. A block may be in both tables. Blocks that
  # are in the source only may be given to others from the next plan on; a worker that compresses beside
  # the steps orders those writes. If the slot is paused by this plan or stays so, the compression may run
  # beside the steps until a result names it as finished; else it is done before the slot runs. The
  # compressions of a plan have the effect of one after the other.
  sequenceSlot @0 :Int32;  # Has a query slot.
  sourceTable @1 :List(Int32);  # The slot's block table so far.
  targetTable @2 :List(Int32);
  # Leading slots that are kept whatever their score. Blocks wholly among them are the same in both
  # tables and are not written: others may share them.
  numPinned @3 :UInt32;
}

struct Swap {
  # To the host: the slot's blocks and query window are copied to host memory, the slot gives up both
  # and sits out. To the device: they come back, into these blocks and the query slot that the same plan
  # may give; the slot runs again.
  sequenceSlot @0 :Int32;
  toHost @1 :Bool;
  deviceBlocks @2 :List(Int32);  # The slot's block table before, or after.
}

# ---------------------------------------------------------------- clients and scheduler (job socket)

struct ClientMessage {
  union {
    submit @0 :SubmitJob;
    cancel @1 :UInt64;  # Job id.
    status @2 :Void;
  }
}

struct SubmitJob {
  name @0 :Text;  # For people.
  inputPath @1 :Text;  # Absolute, as the scheduler sees it.
  outputPath @2 :Text;  # Absolute; must not exist unless overwrite.
  overwrite @3 :Bool;
  numLines @4 :UInt64;  # Lines that are not blank, for progress; 0 is unknown.
}

struct ClientReply {
  union {
    accepted @0 :UInt64;  # Job id.
    status @1 :EngineStatus;
    error @2 :Text;  # One line: the request was refused, and why.
    cancelled @3 :UInt64;  # Job id.
  }
}

enum JobState {
  running @0;
  finished @1;
  cancelled @2;
  failed @3;  # The input could not be read or the output not written; see error.
}

struct JobStatus {
  id @0 :UInt64;
  name @1 :Text;
  state @2 :JobState;
  inputPath @3 :Text;
  outputPath @4 :Text;
  numLines @5 :UInt64;  # As submitted, or as read once the end was seen.
  numRead @6 :UInt64;
  numSucceeded @7 :UInt64;
  numFailed @8 :UInt64;  # Lines answered with an error record.
  numRunning @9 :UInt64;  # Requests with a running sequence.
  promptTokens @10 :UInt64;
  outputTokens @11 :UInt64;
  seconds @12 :Float64;  # Since it was submitted, until it ended.
  error @13 :Text;
}

struct WorkerStatus {
  rank @0 :UInt32;
  pid @1 :Int64;
  phase @2 :WorkerPhase;
  step @3 :UInt64;
  heartbeatAge @4 :Float64;  # Seconds.
  device @5 :Text;
}

struct EngineStatus {
  model @0 :Text;
  ready @1 :Bool;  # All workers are ready and jobs run.
  uptime @2 :Float64;  # Seconds.
  step @3 :UInt64;
  blockSize @4 :UInt32;
  numBlocks @5 :UInt64;
  numFreeBlocks @6 :UInt64;
  numCachedBlocks @7 :UInt64;
  numUsedBlocks @8 :UInt64;
  numRunning @9 :UInt64;  # Sequences.
  numWaiting @10 :UInt64;
  numPreemptions @11 :UInt64;
  promptTokens @12 :UInt64;  # Prefilled, recomputation included, prefix hits not.
  cachedTokens @13 :UInt64;  # Prompt tokens that were prefix hits.
  outputTokens @14 :UInt64;
  deviceSeconds @15 :Float64;
  peakRunning @16 :UInt64;
  recomputedTokens @17 :UInt64;  # Prefilled again after a preemption.
  draining @18 :Bool;  # No new requests are started; the engine is about to stop.
  workers @19 :List(WorkerStatus);
  jobs @20 :List(JobStatus);
  jobEndpoint @21 :Text;  # Besides the run directory's socket, with the port taken; empty is none.
  numQuerySlots @22 :UInt64;
  numUsedQuerySlots @23 :UInt64;
  numSwapped @24 :UInt64;  # Sequences whose blocks are in host memory now.
  numSwapsOut @25 :UInt64;
  numCompressions @26 :UInt64;
  compressionSeconds @27 :Float64;
  # Over the time the engine was busy, in equal parts of historySeconds: mean number of running sequences,
  # and mean share of blocks in use.
  runningHistory @28 :List(Float32);
  blockHistory @29 :List(Float32);
  historySeconds @30 :Float64;
}
