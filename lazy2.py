import sys, time, threading, faulthandler
from remora import rpc
from remora.testing.world import World
def f(): return 1
sys.setswitchinterval(float(sys.argv[1]))
with World(2, timeout=4.) as w:
    with w.acting(0): rpc.rpc_sync("worker1", f)
    stop=time.time()+20; calls=[0]; last=[time.time()]*4; done=threading.Event()
    def run(i):
        with w.acting(0):
            while time.time()<stop and not done.is_set():
                fs=[rpc.rpc_async("worker1", f) for _ in range(3)]
                calls[0]+=3
                for x in fs:
                    x.wait()
                last[i]=time.time()
    ts=[threading.Thread(target=run,args=(i,)) for i in range(4)]
    [t.start() for t in ts]
    while time.time()<stop:
        time.sleep(.02)
        if time.time()-max(last)>.15:
            o=w[0].agent.peers.find("worker1").outgoing; i=w[1].agent.peers.find("worker0").incoming
            for n,c,cr in (("out",o,w[0].agent.crew),("in",i,w[1].agent.crew)):
                print(n,"lazy",len(c._lazy),"pend",len(c.pending),"unw",c._unwatched,"paused",c._paused,"outbox",c.link.outbox_bytes,"reading",c._reading.locked(),"writing",c._writing.locked(),c.session, "crew",cr.counts(),"backlog",cr.backlog,"serv",len(cr._services),"kicked",cr._kicked, "jobs", c._jobs_in, c._jobs_out)
            faulthandler.dump_traceback(all_threads=True)
            done.set(); break
    [t.join() for t in ts]
    print(calls)
